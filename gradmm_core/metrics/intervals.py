"""Means over seeds with Student intervals, paired differences, and intervals over test rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import stats

CONFIDENCE = 0.95

#: Resamples of the test rows.
RESAMPLES = 10_000

#: Minimum number of seeds for an interval. With two, it is about 18 times the standard deviation wide.
MIN_SEEDS = 3

Verdict = Literal["higher", "lower", "within noise", "too few seeds"]


@dataclass(frozen=True)
class SeedMean:
    """Mean over seeds. `half_width` is that of its Student interval, or None below `MIN_SEEDS` seeds."""

    mean: float
    half_width: float | None
    seeds: int

    @property
    def verdict(self) -> Verdict:
        """Compare the interval with zero."""
        if self.half_width is None:
            return "too few seeds"
        if abs(self.mean) <= self.half_width:
            return "within noise"
        return "higher" if self.mean > 0 else "lower"

    def text(self, digits: int) -> str:
        """Format as `0.712 ± 0.008`."""
        mean = f"{self.mean:,.{digits}f}"
        return mean if self.half_width is None else f"{mean} ± {self.half_width:.{digits}f}"

    def lead(self, digits: int) -> str:
        """Format a difference as `+0.021 ± 0.012, higher`."""
        text = self.text(digits)
        return f"{text if text.startswith('-') else f'+{text}'}, {self.verdict}"


def mean_over_seeds(values: Sequence[float], confidence: float = CONFIDENCE) -> SeedMean:
    """Return the mean and Student interval of independent, approximately normal values, one per seed.

    Raises:
        ValueError: if there are no values, or any is not finite.
    """
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"no mean of {list(values)}")
    count, mean = len(values), math.fsum(values) / len(values)
    if count < MIN_SEEDS:
        return SeedMean(mean, None, count)
    half_width = stats.t.ppf((1 + confidence) / 2, count - 1) * stats.sem(values)
    return SeedMean(mean, float(half_width), count)


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> SeedMean:
    """Return the mean of first - second, paired by seed, so that common effects of a seed cancel.

    Raises:
        ValueError: if their lengths differ.
    """
    return mean_over_seeds([a - b for a, b in zip(first, second, strict=True)], confidence)


def interval_over_rows(values: Float[np.ndarray, " rows"], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean over test rows: its ends, low and high.

    For a mean over seeds, `values` are each row's means over seeds. The interval then says by how much other test
    rows would have moved the figure, with these generations and trainings. The resamples are always the same.
    NaN for fewer than two rows.
    """
    if len(values) < 2:
        return math.nan, math.nan
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=1000,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
