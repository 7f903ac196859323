"""Redaction of errors raised while private records are read: a library's message may quote one in a log."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from gradmm.errors import InputError, RedactedError
from gradmm.storage.artifacts import publish
from gradmm.storage.location import Location

Result = TypeVar("Result")


def redact_errors(work: Callable[[], Result], where: str, folder: Location) -> Result:
    """Return `work()`. Reduce its errors to their type and the line of code that raised them.

    `InputError`s and the operating system's errors pass: they name rows and files, never texts. Their causes are
    removed, because logs print them. (A context manager would not do: the error raised on its exit keeps the
    original one as its context.)

    Args:
        where: the stage.
        folder: private folder for a file with the full error.

    Raises:
        RedactedError: instead of any other error.
    """
    try:
        return work()
    except RedactedError:
        raise
    except Exception as error:
        if isinstance(error, InputError) or _is_system_error(error):
            error.__cause__ = error.__context__ = None
            raise
        saved = _save(error, where, folder)
        message = f"{where}: {_type_and_line(error)}; its message may quote private records and is {saved}"
    raise RedactedError(message)


def _is_system_error(error: Exception) -> bool:
    """Return whether the message is the operating system's ('No space left on device') and a file name."""
    return isinstance(error, OSError) and error.errno is not None and error.strerror == os.strerror(error.errno)


def _type_and_line(error: Exception) -> str:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__} in {frame.f_globals['__name__']}.{frame.f_code.co_name}, line {line}"


def _save(error: Exception, where: str, folder: Location) -> str:
    """Write the full error to a private file; return where it is."""
    file = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{where}.txt"
    try:
        publish(file, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
    except (InputError, OSError):
        return "lost because the root cannot be written"
    return f"in {file}, readable by its owner only"
