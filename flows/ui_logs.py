"""Brings the log of `gradmm_core`, which is the standard library's, to the logs of a flow run in Prefect's UI."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler


@contextmanager
def logs_in_ui() -> Iterator[None]:
    """Within, what `gradmm_core` logs from INFO on is sent to the server as the log of the flow run, once.

    Prefect's own setting (`logging.extra_loggers`) is read from a pyproject.toml in the current folder only, and
    leaves the level to the root logger, which drops what is no warning.
    """
    log = logging.getLogger("gradmm_core")
    level, handler = log.level, APILogHandler()
    has_one = any(isinstance(each, APILogHandler) for each in log.handlers)
    if not has_one:
        log.addHandler(handler)
    if log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        if not has_one:
            log.removeHandler(handler)
