"""How much memory work takes, and doing it in smaller parts where it does not fit."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import psutil

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: How often resident memory is looked at (the kernel's own peak cannot be reset everywhere), and how often where
#: other processes have to be found first.
SECONDS_BETWEEN_SAMPLES, WITH_CHILDREN = 0.02, 0.5


@dataclass
class PeakMemory:
    """The most that was in use at once, in bytes: resident, and on this process's GPU if there is one."""

    process: int = 0
    gpu: int | None = None


@contextmanager
def peak_memory(children: bool = False) -> Iterator[PeakMemory]:
    """Measures while it is entered: this process's resident memory, and what torch has on its GPU.

    The process's is what it holds in all, libraries and models included, as sampled; the GPU's is one counter,
    so that this is not to be nested.

    Args:
        children: add the memory of processes that this one has started.
    """
    peak = PeakMemory()
    if cuda := _cuda():
        cuda.reset_peak_memory_stats()
    process, done = psutil.Process(), threading.Event()

    def sample() -> None:
        processes = [process, *(process.children(recursive=True) if children else ())]
        peak.process = max(peak.process, sum(map(_resident, processes)))

    def sample_until_done() -> None:
        while not done.wait(WITH_CHILDREN if children else SECONDS_BETWEEN_SAMPLES):
            sample()

    sampler = threading.Thread(target=sample_until_done, name="peak-memory", daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()
        sample()
        if cuda := _cuda():
            peak.gpu = cuda.max_memory_allocated()


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
    if cuda := _cuda():
        cuda.empty_cache()
    half = (len(numbers) + 1) // 2
    logger.warning("%d examples at once do not fit into memory: going on with %d", len(numbers), half)
    return [*in_parts_that_fit(work, numbers[:half]), *in_parts_that_fit(work, numbers[half:])]


def _is_out_of_memory(error: BaseException) -> bool:
    """The CPU's allocator has no exception of its own."""
    import torch  # late: memory is measured of cached stages too, which need no torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # it ended a moment ago
        return 0


def _cuda() -> ModuleType | None:
    """torch.cuda where there is a GPU. Not imported for it: who has not imported torch holds nothing on a GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_available() else None
