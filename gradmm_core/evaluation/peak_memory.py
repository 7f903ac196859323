"""Peak memory measurement."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import psutil

#: Sampling intervals of resident memory, without and with child processes, which take time to find. (The kernel's
#: own peak cannot be reset on all systems.)
SAMPLE_SECONDS, SAMPLE_SECONDS_WITH_CHILDREN = 0.02, 0.5


@dataclass
class PeakMemory:
    """Peak memory in bytes: resident, and on this process's GPU if there is one."""

    process: int = 0
    gpu: int | None = None


@contextmanager
def peak_memory(children: bool = False) -> Iterator[PeakMemory]:
    """Measure this process's resident memory and torch's memory on its GPU while the context is active.

    Resident memory is sampled and includes libraries and models. Do not nest: the GPU has a single peak counter.

    Args:
        children: include the memory of child processes.
    """
    peak = PeakMemory()
    if cuda := _cuda():
        cuda.reset_peak_memory_stats()
    process, done = psutil.Process(), threading.Event()

    def sample() -> None:
        processes = [process, *(process.children(recursive=True) if children else ())]
        peak.process = max(peak.process, sum(map(_resident, processes)))

    def sample_until_done() -> None:
        while not done.wait(SAMPLE_SECONDS_WITH_CHILDREN if children else SAMPLE_SECONDS):
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


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # it has just ended
        return 0


def _cuda() -> ModuleType | None:
    """Return torch.cuda if there is a GPU. Do not import torch: without it, nothing is on the GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch and torch.cuda.is_available() else None
