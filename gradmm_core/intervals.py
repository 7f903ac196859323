"""Means over seeds, how sure they are, and whether two of them differ by more than the seeds do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95

#: Seeds that an interval needs. Student's of two values is 18 times as wide as their distance: it says nothing.
LEAST_SEEDS = 3

Verdict = Literal["higher", "lower", "within noise", "too few seeds"]


@dataclass(frozen=True)
class SeedMean:
    """The mean over seeds; `half_width` of its Student interval is None for fewer than `LEAST_SEEDS` of them."""

    mean: float
    half_width: float | None
    seeds: int

    @property
    def verdict(self) -> Verdict:
        """On which side of zero the interval lies, if on one."""
        if self.half_width is None:
            return "too few seeds"
        if abs(self.mean) <= self.half_width:
            return "within noise"
        return "higher" if self.mean > 0 else "lower"

    def text(self, digits: int) -> str:
        """As in `0.712 ± 0.008`."""
        mean = f"{self.mean:,.{digits}f}"
        return mean if self.half_width is None else f"{mean} ± {self.half_width:.{digits}f}"

    def lead(self, digits: int) -> str:
        """Of a difference, as in `+0.021 ± 0.012, higher`."""
        text = self.text(digits)
        return f"{text if text.startswith('-') else f'+{text}'}, {self.verdict}"


def mean_over_seeds(values: Sequence[float], confidence: float = CONFIDENCE) -> SeedMean:
    """The mean of values that are independent and about normal, one for each seed.

    Raises:
        ValueError: for no values, or one that is not finite.
    """
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"no mean of {list(values)}")
    count, mean = len(values), math.fsum(values) / len(values)
    if count < LEAST_SEEDS:
        return SeedMean(mean, None, count)
    half_width = stats.t.ppf((1 + confidence) / 2, count - 1) * stats.sem(values)
    return SeedMean(mean, float(half_width), count)


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> SeedMean:
    """The mean of first - second, seed by seed: what both have from a seed cancels.

    Raises:
        ValueError: if they have not as many values.
    """
    return mean_over_seeds([a - b for a, b in zip(first, second, strict=True)], confidence)
