"""How much memory work takes, and doing it in smaller parts where it does not fit."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class PeakMemory:
    """The most that was in use at once, in bytes. None where it cannot be told, or there is no GPU."""

    process: int | None = None
    gpu: int | None = None


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measures while it is entered: this process's resident memory (on Linux), and what torch has on its GPU.

    The process's is what it holds in all, libraries and models included. Not to be nested: it is one counter.
    """
    peak = PeakMemory()
    resident = _reset_resident_peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield peak
    finally:
        if resident:
            peak.process = _resident_peak()
        if torch.cuda.is_available():
            peak.gpu = torch.cuda.max_memory_allocated()


def in_parts_that_fit(work: Callable[[range], Result], numbers: range) -> list[Result]:
    """`work(numbers)`, or where memory does not suffice for that, of its halves, and so on.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: if there is not enough for a single number.
    """
    try:
        return [work(numbers)]
    except (RuntimeError, MemoryError) as error:
        if len(numbers) == 1 or not _is_out_of_memory(error):
            raise
    # Out of the handler: until here the exception kept everything that the attempt had allocated.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = (len(numbers) + 1) // 2
    logger.warning("%d examples at once do not fit into memory: going on with %d", len(numbers), half)
    return [*in_parts_that_fit(work, numbers[:half]), *in_parts_that_fit(work, numbers[half:])]


def _is_out_of_memory(error: BaseException) -> bool:
    """The CPU's allocator has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _reset_resident_peak() -> bool:
    if sys.platform != "linux":
        return False
    try:
        _CLEAR.write_text("5")
    except OSError:  # some containers do not let one
        return False
    return True


def _resident_peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
