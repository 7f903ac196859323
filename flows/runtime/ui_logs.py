"""Logs of `gradmm` in Prefect's UI."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler


@contextmanager
def logs_in_ui() -> Iterator[None]:
    """Send what `gradmm` logs at INFO or above to the flow run's log on the server. Nested, send it once.

    Prefect's own setting `logging.extra_loggers` does not suffice. It is read only from a pyproject.toml in the
    current folder, and it keeps the root logger's level, which drops everything below WARNING.
    """
    log = logging.getLogger("gradmm")
    level, handler = log.level, APILogHandler()
    nested = any(isinstance(other, APILogHandler) for other in log.handlers)
    if not nested:
        log.addHandler(handler)
    if log.getEffectiveLevel() > logging.INFO:
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        if not nested:
            log.removeHandler(handler)
