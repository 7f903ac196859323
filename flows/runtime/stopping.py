"""Stopping on Ctrl-C, also where Python loses it.

Python raises KeyboardInterrupt once, in whatever code is running. Code that suppresses exceptions, such as a
destructor, loses it, and the run would continue. Code that raises another exception while it handles this one, as
Prefect does where a task is about to start, would make an error of it.

A second signal ends the process at once: the first one's exception may be lost, or its cleanup may wait for a
server. The next run continues from there, as it does after `kill -9`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gradmm.errors import InputError

EXIT_INTERRUPTED = 130

STOPPED = "gradmm: stopped; finished stages and shards are kept, the same command resumes"

_interrupted = threading.Event()


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM. SIGTERM's default leaves child servers running.

    Only the main thread receives signals; in any other thread, do nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if _interrupted.is_set() or _hides_a_signal(error):
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _interrupted.clear()


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if a signal has arrived, whether or not it was raised then."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def _hides_a_signal(error: BaseException) -> bool:
    """Whether an error was raised while Prefect's own exception for SIGTERM was handled."""
    # Imported here: it takes a second, and most commands end without an error.
    from prefect.exceptions import TerminationSignal

    while (cause := error.__cause__ or error.__context__) is not None:
        if isinstance(cause, TerminationSignal):
            return True
        error = cause
    return False


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process without any cleanup: the handler of a signal that arrives during the cleanup."""
    os._exit(EXIT_INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _interrupted.is_set():
        os.write(2, f"{STOPPED}\n".encode())
        end_at_once(number, frame)
    _interrupted.set()
    signal.default_int_handler(number, frame)
