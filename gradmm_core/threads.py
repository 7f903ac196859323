"""How torch computes on this machine: its threads, and its products of matrices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: How often a thread of torch looks for the others' results before it sleeps. OpenMP's own number is 300 times
#: as large: on a machine whose cores are busy, threads then mostly wait for one another.
SPINS = 1000


def limit_spinning() -> None:
    """Let torch's threads sleep soon when they wait, unless the environment says how they wait.

    It has an effect before torch is imported only. Computing takes up to a tenth longer where cores are free, and
    a fraction of the time where others keep them busy (docs/results/speed.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Limit torch to `count` threads while the context is active."""
    import torch  # late: the demo's material does without it once it is complete

    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def reduced_precision_products() -> Iterator[None]:
    """Let processors round the factors of float32 matrix products while active; sums stay in float32.

    A GPU then computes products in TF32, and a CPU by oneDNN, in bfloat16 if it has instructions for that. A CPU
    without them still computes in float32; on AMD processors this is twice as fast as by the default library.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bfloat16_slowdown(repeats: int = 5) -> float:
    """Time a product of matrices on the CPU in bfloat16, relative to float32.

    Without instructions for bfloat16 a processor takes several times as long. The fastest of the repeats counts,
    as other work slows some of them down.
    """
    import torch

    def seconds(dtype: torch.dtype) -> float:
        states, weights = torch.ones(256, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
        start = time.perf_counter()
        torch.nn.functional.linear(states, weights)
        return time.perf_counter() - start

    times = [(seconds(torch.bfloat16), seconds(torch.float32)) for _ in range(1 + repeats)]
    of_bfloat16, of_float32 = (min(of_dtype) for of_dtype in zip(*times[1:], strict=True))  # the first warms up
    return of_bfloat16 / of_float32
