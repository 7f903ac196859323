"""How fast torch computes on this machine."""

from __future__ import annotations

from itertools import accumulate

import pytest

from gradmm.threads import bfloat16_slowdown


def test_the_fastest_products_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [9, 9, 8, 5, 6, 2, 7, 3]  # in turn of bfloat16 and float32; the first two warm up
    ticks = iter(
        [
            tick
            for end, of_one in zip(accumulate(durations), durations, strict=True)
            for tick in (end - of_one, end)
        ]
    )
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    assert bfloat16_slowdown(repeats=3) == 6 / 2


def test_a_product_takes_time() -> None:
    assert bfloat16_slowdown(repeats=1) > 0
