"""How one release's sensitivity is divided among its parts, and how much of a probe its noise leaves room for.

A record's vector has three parts: its gradient, its text's features, and their products. Each part is clipped to a
norm of its own, and the squares of these norms add up to C^2: the whole is one vector of norm at most C, and one
Gaussian release of its sum costs what a release of gradients alone costs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradmm_core.settings import TargetGradientSettings

#: Of a probe's part of C^2, what the class sums have; the second moment has the rest. It has far more coordinates.
CLASS_SUM_SHARE = 0.3

#: The constant at the end of a record's features: its sum counts the records. The features' own norm is at most 1.
CONSTANT = 0.5

#: Directions of a probe that no noise limits.
MOST_DIMENSIONS = 1024

#: A probe of fewer has learnt so little that a search finds the texts which its errors like: measured in
#: docs/experiments.md, "Few rows and much noise".
FEWEST_DIMENSIONS = 16


class ReleaseNorms(NamedTuple):
    """The largest norm of each part of one record's vector. Those of a probe are zero where there is none."""

    gradient: float
    class_sum: float = 0.0
    second_moment: float = 0.0

    @classmethod
    def of(
        cls, clipping_norm: float, probe_share: float, class_sum_share: float = CLASS_SUM_SHARE
    ) -> ReleaseNorms:
        """Args:
        probe_share: the probe's part of C^2; at least 0 and less than 1.
        class_sum_share: of the probe's, what the class sums have.
        """
        probe = clipping_norm * math.sqrt(probe_share)
        return cls(
            clipping_norm * math.sqrt(1 - probe_share),
            probe * math.sqrt(class_sum_share),
            probe * math.sqrt(1 - class_sum_share),
        )


def settled(
    settings: TargetGradientSettings,
    clipping_norm: float,
    sigma: float | None,
    declared_records: int | None,
) -> TargetGradientSettings:
    """The settings with a number for `probe_dimensions='auto'`: as many as fit under the noise.

    Where these are fewer than `FEWEST_DIMENSIONS`, there is no probe, and the gradient has all of C^2.
    Nothing private decides.

    Args:
        sigma: of the release's noise; None without any.
    """
    if settings.probe_share == 0 or settings.probe_dimensions != "auto":
        return settings
    if sigma is None:
        return settings.model_copy(update={"probe_dimensions": MOST_DIMENSIONS})
    assert declared_records is not None  # the recipe's validation asked for it
    norms = ReleaseNorms.of(clipping_norm, settings.probe_share)
    fitting = fitting_dimensions(norms.second_moment, sigma, declared_records)
    if fitting < FEWEST_DIMENSIONS:
        return settings.model_copy(update={"probe_share": 0.0})
    return settings.model_copy(update={"probe_dimensions": min(MOST_DIMENSIONS, fitting)})


def fitting_dimensions(second_moment_norm: float, sigma: float, records: int) -> int:
    """So many that the noise's spectral norm is at most half of the average eigenvalue that the second moment
    would have if real texts were spread as public ones are, sqrt(2 k) sd / N <= 1 / (2 k), and at least one.
    """
    deviation = sigma / second_moment_norm * (1 + CONSTANT**2)
    return max(1, int((records / (2 * math.sqrt(2) * deviation)) ** (2 / 3)))
