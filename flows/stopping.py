"""Ctrl-C that is not lost.

The interpreter raises KeyboardInterrupt once, in whatever code it happens to be in. Where that lets nothing out (a
destructor, bookkeeping that must not fail), it is gone, and the run would go on as if nobody had asked.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = threading.Event()


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end what is within as Ctrl-C does: by itself SIGTERM would leave servers that it started.

    In the main thread only: others get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked.clear()


def stop_if_asked() -> None:
    """Raises:
    KeyboardInterrupt: if one was asked for before, though it may have been raised then.
    """
    if _asked.is_set():
        raise KeyboardInterrupt


def _ask(number: int, frame: FrameType | None) -> None:
    _asked.set()
    signal.default_int_handler(number, frame)
