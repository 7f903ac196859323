"""Running a flow in this process: its root, a Prefect server for this run alone, and progress on stderr."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gradmm.storage.location import Location

if TYPE_CHECKING:
    from gradmm.config.recipe import Recipe
    from gradmm.outputs.record import RunRecord

#: Interval of runs' heartbeats. A run without one for several of these is dead to `gradmm serve`'s automation.
HEARTBEAT_SECONDS = 30


@contextmanager
def for_the_owner_only() -> Iterator[None]:
    """Let only the owner read new files, also those of the servers and workers started within."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def local_run(root: Location, verbose: bool) -> Iterator[Callable[[], None]]:
    """Start a Prefect server while the caller imports its flow. Yields a function that waits for the server."""
    from gradmm.storage.artifacts import Root

    Root(path=root).prepare()  # first: Prefect takes seconds to start
    configure_prefect(verbose)

    from gradmm.deployments.serving.prefect_server import server_of_one_run

    with server_of_one_run() as server:
        yield server.wait if server else lambda: None


def run_recipe_here(
    recipe: Recipe, root: Location, force: tuple[str, ...] = (), quiet: bool = False, verbose: bool = False
) -> RunRecord:
    """Run a recipe in this process, and return its record."""
    with local_run(root, verbose) as wait_for_server:
        from gradmm.flows.distil import distil

        wait_for_server()
        blocks = {name: getattr(recipe, name) for name in type(recipe).model_fields}
        with progress_on_stderr(quiet):
            return distil(**blocks, root=str(root), force=force)  # pyright: ignore[reportReturnType]


@contextmanager
def progress_on_stderr(quiet: bool = False) -> Iterator[None]:
    """Write gradmm's log to stderr in plain lines; if `quiet`, only its warnings.

    The log does not propagate: the root logger has Prefect's console handler, which would repeat each line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    log = logging.getLogger("gradmm")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = True
        log.removeHandler(handler)


def configure_prefect(verbose: bool) -> None:
    """Set Prefect's log level and startup patience. Prefect reads them on its first import."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "WARNING" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
