"""Running a flow here and now: its root, Prefect's server for this one run, and progress in plain lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gradmm_core.location import Location


@contextmanager
def local_run(root: Location, verbose: bool) -> Iterator[Callable[[], None]]:
    """Starts the server while the caller imports what it runs; yields what waits until the server is there."""
    from gradmm_core.artifacts import Root

    Root(path=root).prepare()  # before Prefect takes its seconds to start
    _configure_prefect(verbose)

    from deployments.prefect_server import server_of_one_run

    with server_of_one_run() as server:
        yield server.wait if server else _nothing_to_wait_for


@contextmanager
def progress_on_stderr() -> Iterator[None]:
    """Our own log, in plain lines. Not passed on: the root logger has Prefect's console, which would repeat it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
    log = logging.getLogger("gradmm_core")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = True
        log.removeHandler(handler)


def _configure_prefect(verbose: bool) -> None:
    """Prefect's own log only if asked for, and patience for its first start. Read when Prefect is imported."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "WARNING" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")


def _nothing_to_wait_for() -> None:
    pass
