"""Divide the clipping norm among the parts of a record's vector, and size the probe to the noise.

A record's vector has three parts: its gradient, its text's features, and the products of these features. Each part
is clipped to its own norm, and the squares of the three norms add up to C^2. The whole vector therefore has a norm
of at most C, and one Gaussian release of its sum has the privacy cost of releasing the gradients alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradmm.config.settings import TargetGradientSettings

#: The class sums' share of the probe's part of C^2. The second moment, with far more coordinates, has the rest.
CLASS_SUM_SHARE = 0.3

#: The constant appended to a record's features, which have norm at most 1. Its sum counts the records.
CONSTANT = 0.5

#: The largest number of a probe's dimensions.
MAX_DIMENSIONS = 1024

#: Below this, the search exploits the probe's errors: see docs/research/few-records.md, "Few rows and much noise".
MIN_DIMENSIONS = 16


class ReleaseNorms(NamedTuple):
    """The largest norm of each part of one record's vector; zero for the probe's parts without a probe."""

    gradient: float
    class_sum: float = 0.0
    second_moment: float = 0.0

    @classmethod
    def of(
        cls, clipping_norm: float, probe_share: float, class_sum_share: float = CLASS_SUM_SHARE
    ) -> ReleaseNorms:
        """Divide C = `clipping_norm`, so that the squares of the norms add up to C^2.

        Args:
            probe_share: the probe's share of C^2; at least 0 and less than 1.
            class_sum_share: the class sums' share of the probe's part.
        """
        probe = clipping_norm * math.sqrt(probe_share)
        return cls(
            clipping_norm * math.sqrt(1 - probe_share),
            probe * math.sqrt(class_sum_share),
            probe * math.sqrt(1 - class_sum_share),
        )


def with_probe_dimensions(
    settings: TargetGradientSettings,
    clipping_norm: float,
    sigma: float | None,
    declared_records: int | None,
) -> TargetGradientSettings:
    """Replace `probe_dimensions='auto'` by `fitting_dimensions`, at most `MAX_DIMENSIONS`.

    If fewer than `MIN_DIMENSIONS` fit, there is no probe, and the gradient has all of C^2. The result depends on
    public quantities only.

    Args:
        sigma: standard deviation of the release's noise; None without noise.
    """
    if settings.probe_share == 0 or settings.probe_dimensions != "auto":
        return settings
    if sigma is None:
        return settings.model_copy(update={"probe_dimensions": MAX_DIMENSIONS})
    assert declared_records is not None  # the recipe's validation requires it
    norms = ReleaseNorms.of(clipping_norm, settings.probe_share)
    fitting = fitting_dimensions(norms.second_moment, sigma, declared_records)
    if fitting < MIN_DIMENSIONS:
        return settings.model_copy(update={"probe_share": 0.0})
    return settings.model_copy(update={"probe_dimensions": min(MAX_DIMENSIONS, fitting)})


def fitting_dimensions(second_moment_norm: float, sigma: float, records: int) -> int:
    """Compute the largest number k of dimensions, at least 1, with sqrt(2 k) sd / N <= 1 / (2 k).

    With sd the noise's standard deviation in each entry of the sum of N = `records` second moments, the left side
    is the spectral norm of the noise in their mean. The right side is half of the mean's average eigenvalue for
    texts that are distributed like public ones.
    """
    deviation = sigma / second_moment_norm * (1 + CONSTANT**2)
    return max(1, int((records / (2 * math.sqrt(2) * deviation)) ** (2 / 3)))
