"""Divide the clipping norm among the parts of a record's vector, and size the probe to the noise.

A record's vector has up to four parts: its gradient, its text's features, the products of these features, and its
text's tokens. Each part is clipped to its own norm, and the squares of the norms add up to C^2. The whole vector
therefore has a norm of at most C, and one Gaussian release of its sum has the privacy cost of releasing the
gradients alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradmm.config.settings import TargetGradientSettings

#: The class sums' share of the probe's part of C^2. The second moment, with far more coordinates, has the rest.
CLASS_SUM_SHARE = 0.3

#: The constant appended to a record's features, and to its tokens, which have norm at most 1. Its sum counts the
#: records.
CONSTANT = 0.5

#: The largest number of a probe's dimensions.
MAX_DIMENSIONS = 1024

#: Share of a class's records that contain one of its common tokens.
COMMON_TOKEN = 0.05

#: Below this, the search exploits the probe's errors: see docs/research/few-records.md, "Few rows and much noise".
#: Class sums alone have this number: see docs/research/labels.md, "Class sums alone".
MIN_DIMENSIONS = 16

#: Largest noise in a class's count with which class sums alone are released: as a share of all records, and of a
#: class's records if all classes have equally many.
COUNT_NOISE = 1 / 16
CLASS_COUNT_NOISE = 1 / 2

#: The same, as a share of a class's records, with which a second moment is released beside them. It takes most of
#: the probe's share, and where the class means are too noisy, it costs more than it tells.
MOMENT_COUNT_NOISE = 1 / 16


class ReleaseNorms(NamedTuple):
    """The largest norm of each part of one record's vector; zero for a part that is not released."""

    gradient: float
    class_sum: float = 0.0
    second_moment: float = 0.0
    token_sum: float = 0.0

    @classmethod
    def of(
        cls,
        clipping_norm: float,
        probe_share: float,
        token_share: float = 0.0,
        class_sum_share: float = CLASS_SUM_SHARE,
    ) -> ReleaseNorms:
        """Divide C = `clipping_norm`, so that the squares of the norms add up to C^2.

        Args:
            probe_share, token_share: shares of C^2 of the probe and of the token sums; at least 0, and less than 1
                together.
            class_sum_share: the class sums' share of the probe's part; 1 without a second moment.
        """
        probe = clipping_norm * math.sqrt(probe_share)
        return cls(
            clipping_norm * math.sqrt(1 - probe_share - token_share),
            probe * math.sqrt(class_sum_share),
            probe * math.sqrt(1 - class_sum_share),
            clipping_norm * math.sqrt(token_share),
        )

    @classmethod
    def of_target(cls, clipping_norm: float, settings: TargetGradientSettings) -> ReleaseNorms:
        """Divide C = `clipping_norm` among the parts that `settings` release."""
        class_sums = 1.0 if settings.releases_class_sums_alone else CLASS_SUM_SHARE
        return cls.of(clipping_norm, settings.probe_share, settings.token_share, class_sums)


def with_parts_that_fit(
    settings: TargetGradientSettings,
    clipping_norm: float,
    sigma: float | None,
    declared_records: int | None,
    classes: int,
) -> TargetGradientSettings:
    """Leave out parts that the noise would drown, and resolve `probe_dimensions` and `probe_covariance`.

    Token rates are left out if `tokens_fit` says so; the probe then has their share of C^2. The probe has
    `fitting_dimensions`. If fewer than `MIN_DIMENSIONS` fit, or the noise in the counts
    exceeds `MOMENT_COUNT_NOISE`, its class sums alone are released, unless the settings ask for the records'
    covariance; if not even these fit (`class_sums_fit`), there is no probe, and the gradient has its share. The
    result depends on public quantities only.

    Args:
        sigma: standard deviation of the release's noise; None without noise.
    """
    # The recipe's validation requires `declared_records` where noise is compared with it.
    sigma, records = sigma or 0.0, declared_records or 0
    if settings.token_share > 0:
        norm = ReleaseNorms.of_target(clipping_norm, settings).token_sum
        if not tokens_fit(norm, sigma, records, classes):
            share = settings.probe_share + settings.token_share if settings.probe_share else 0.0
            settings = settings.model_copy(update={"token_share": 0.0, "probe_share": share})
    if settings.probe_share == 0:
        return settings
    return _with_probe_that_fits(settings, clipping_norm, sigma, records, classes)


def _with_probe_that_fits(
    settings: TargetGradientSettings, clipping_norm: float, sigma: float, records: int, classes: int
) -> TargetGradientSettings:
    asked = settings.probe_covariance
    by_records, by_public_text = (
        settings.model_copy(update={"probe_covariance": covariance}) for covariance in ("records", "public")
    )
    if settings.probe_dimensions != "auto":
        return by_public_text if asked == "public" else by_records
    norms = ReleaseNorms.of_target(clipping_norm, by_records)
    dimensions = fitting_dimensions(norms.second_moment, sigma, records)
    counted = count_noise(norms.class_sum, sigma) <= MOMENT_COUNT_NOISE * records / classes
    if dimensions >= MIN_DIMENSIONS and (asked == "records" or (asked == "auto" and counted)):
        return by_records.model_copy(update={"probe_dimensions": dimensions})
    norms = ReleaseNorms.of_target(clipping_norm, by_public_text)
    if asked != "records" and class_sums_fit(norms.class_sum, sigma, records, classes):
        return by_public_text.model_copy(update={"probe_dimensions": MIN_DIMENSIONS})
    return settings.model_copy(update={"probe_share": 0.0})


def tokens_fit(token_sum_norm: float, sigma: float, records: int, classes: int) -> bool:
    """Return whether a common token of a class stands out from the noise in its class's token sum.

    A token that is in `COMMON_TOKEN` of the records of a class, each of about 16 different tokens and so with an
    entry of 1/4, has to move the sum by three standard deviations.
    """
    moved = COMMON_TOKEN * records / classes / 4
    return moved * token_sum_norm >= 3 * sigma * math.sqrt(1 + CONSTANT**2)


def class_sums_fit(class_sum_norm: float, sigma: float, records: int, classes: int) -> bool:
    """Return whether the noise in a class's count is at most `COUNT_NOISE` and `CLASS_COUNT_NOISE`.

    The counts come from the class sums, and divide them.
    """
    return count_noise(class_sum_norm, sigma) <= records * min(COUNT_NOISE, CLASS_COUNT_NOISE / classes)


def count_noise(class_sum_norm: float, sigma: float) -> float:
    """Compute the standard deviation of the noise in a class's count, which its sum of x contains."""
    return sigma / class_sum_norm * math.sqrt(1 + CONSTANT**2) / CONSTANT


def fitting_dimensions(second_moment_norm: float, sigma: float, records: int) -> int:
    """Compute the largest number k of dimensions, 1 to `MAX_DIMENSIONS`, with sqrt(2 k) sd / N <= 1 / (2 k).

    With sd the noise's standard deviation in each entry of the sum of N = `records` second moments, the left side
    is the spectral norm of the noise in their mean. The right side is half of the mean's average eigenvalue for
    texts that are distributed like public ones.
    """
    if sigma == 0:
        return MAX_DIMENSIONS
    deviation = sigma / second_moment_norm * (1 + CONSTANT**2)
    return min(MAX_DIMENSIONS, max(1, int((records / (2 * math.sqrt(2) * deviation)) ** (2 / 3))))
