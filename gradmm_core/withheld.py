"""Errors where private records are read: a library's message may quote one, and messages end up in logs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from gradmm_core.artifacts import publish
from gradmm_core.errors import InputError, WithheldError
from gradmm_core.location import Location

Result = TypeVar("Result")


def without_messages(work: Callable[[], Result], where: str, folder: Location) -> Result:
    """What `work` returns. No error of it says more than its kind and the line of code that it comes from.

    Our own `InputError`s name rows, never texts, and stay; so do the operating system's errors. What they were
    raised from does not: logs print that too. (For the same reason this is no context manager: what one raises has
    the error that it was left by for its context.)

    Args:
        where: the stage.
        folder: gets a file with the whole error. Private.

    Raises:
        WithheldError: instead of any other error.
    """
    try:
        return work()
    except WithheldError:
        raise
    except Exception as error:
        if isinstance(error, InputError) or _is_the_systems(error):
            error.__cause__ = error.__context__ = None
            raise
        kept = _kept(error, where, folder)
        told = f"{where}: {_kind_and_place(error)}; its message may quote private records and is {kept}"
    raise WithheldError(told)


def _is_the_systems(error: Exception) -> bool:
    """Whether its message is the operating system's: 'No space left on device', and a file's name."""
    return isinstance(error, OSError) and error.errno is not None and error.strerror == os.strerror(error.errno)


def _kind_and_place(error: Exception) -> str:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__} in {frame.f_globals['__name__']}.{frame.f_code.co_name}, line {line}"


def _kept(error: Exception, where: str, folder: Location) -> str:
    file = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{where}.txt"
    try:
        publish(file, "".join(traceback.format_exception(error)).encode(errors="backslashreplace"))
    except (InputError, OSError):
        return "lost, since the root cannot be written"
    return f"in {file}, for its owner only"
