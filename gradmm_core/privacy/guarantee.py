"""State the guarantee of a run, in the words and numbers of every report and release."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context
from importlib.metadata import version

import numpy as np
from jaxtyping import Float
from scipy.special import expit, ndtr, ndtri

from gradmm.config.settings import PrivacySettings, Settings
from gradmm.privacy.mechanism import GaussianMechanism, epsilon_of

#: Share of false alarms for which `Guarantee.in_words` states the share of detections.
FALSE_ALARMS = 0.01

#: The unit of privacy without `privacy.unit_column`.
RECORD = "one record"


class Guarantee(Settings):
    """The guarantee of a mechanism, in the words and numbers of every report and release.

    Attributes:
        unit: whose addition, removal or replacement the guarantee is about.
        releases: all releases under the root that count the same unit, from these data or others, since the number
            of those that share a unit with these data would depend on single units.
        mu: sensitivity / sigma of all releases together (Dong, Roth and Su, 2022); None if their noise is of
            several kinds.
    """

    unit: str = RECORD
    epsilon: float | None
    delta: float | None
    adjacency: str
    clipping_norm: float
    sensitivity: float | None
    sigma: float | None
    calibration: str | None
    accountant: str
    sampler: str | None
    releases: int
    composed_epsilon: float | None
    safe: bool
    mu: float | None = None

    @property
    def rho(self) -> float | None:
        """Zero-concentrated DP of all releases together (Bun and Steinke, 2016)."""
        return None if self.mu is None else self.mu**2 / 2

    @property
    def correct_guesses(self) -> float | None:
        """The largest share of correct guesses whether one unit was among the data, where a coin has 0.5.

        The observer sees all releases and knows all other units. For Gaussian noise the share is Phi(mu / 2)
        (Dong, Roth and Su, 2022). For discrete noise it follows from epsilon and delta.
        """
        if self.mu is None or self.composed_epsilon is None or self.delta is None:
            return None
        if self.sampler == "discrete":
            return float(expit(self.composed_epsilon) + self.delta * expit(-self.composed_epsilon))
        return float(ndtr(self.mu / 2))

    def largest_detection(self, false_alarms: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Compute the largest share of the data's units that an observer detects, by the share of false alarms.

        It is one minus the trade-off function of all releases together (Dong, Roth and Su, 2022): of the Gaussian
        mechanism, or what epsilon and delta allow (Kairouz, Oh and Viswanath, 2015).

        Raises:
            ValueError: without a guarantee for all releases together.
        """
        if self.mu is None or self.composed_epsilon is None or self.delta is None:
            raise ValueError("the releases have no guarantee together")
        if self.sampler != "discrete":
            return ndtr(ndtri(false_alarms) + self.mu)
        return largest_tpr(false_alarms, self.composed_epsilon, self.delta)

    @property
    def in_words(self) -> str:
        """The guarantee's meaning for one unit, for readers who do not know epsilon; empty without a guarantee."""
        if not self.safe or self.correct_guesses is None:
            return ""
        one, that = ("one record", "that record was") if self.unit == RECORD else (self.unit, "those were")
        correct = _percentage_up(self.correct_guesses)
        detected = _percentage_up(float(self.largest_detection(np.array([FALSE_ALARMS]))[0]))
        return (
            f"An attacker who sees all that was released, and knows everything in the data but {one}, guesses "
            f"whether {that} in the data correctly in at most {correct} of cases; a coin is right in 50%. At a "
            f"false-alarm rate of {FALSE_ALARMS:.0%} the attack detects at most {detected} of those that were."
        )

    def epsilon_at(self, delta: float, records: int = 1) -> float | None:
        """Compute the epsilon of all releases together at a delta, for a group of records that belong together.

        A group of k records has k mu (Dong, Roth and Su, 2022), or k^2 rho (Bun and Steinke, 2016).
        """
        if self.mu is None or not self.safe:
            return None
        return epsilon_of(records * self.mu, delta, discrete=self.sampler == "discrete")

    @property
    def sentence(self) -> str:
        """The guarantee in plain words. Without an epsilon, or with seeded noise, it denies any guarantee."""
        if self.epsilon is None or self.delta is None:
            return "No privacy guarantee: the target gradient has no noise, and gradients can reveal texts."
        if not self.safe:
            return "UNSAFE, no privacy guarantee: the noise was drawn from a seed, for testing."
        return (
            f"({self.epsilon:g}, {rounded_up(self.delta, 3)})-differential privacy "
            f"for {self.unit} ({self.adjacency}), "
            f"by one release of a sum with sensitivity {self.sensitivity:g} and Gaussian noise of standard "
            f"deviation {self.sigma:.4g}.{self._together}"
        )

    @property
    def _together(self) -> str:
        if self.releases < 2 or self.composed_epsilon is None:
            return ""
        composed = rounded_up(self.composed_epsilon, 4)
        return f" All {self.releases} releases under the same root compose to at most epsilon {composed}."


def rounded_up(value: float, digits: int) -> str:
    """Write a bound with significant digits, none below it: 8.531e-05 -> '8.54e-05' with three.

    A millionth is ignored, since an epsilon is found by a search.
    """
    context = Context(prec=digits, rounding=ROUND_CEILING)
    return f"{float(context.create_decimal_from_float(value * (1 - 1e-6))):.{digits}g}"


def _percentage_up(share: float) -> str:
    """0.5012 -> '50.2%'."""
    return f"{math.ceil(1000 * share) / 10:.1f}%"


def largest_tpr(fpr: Float[np.ndarray, " n"], epsilon: float, delta: float) -> Float[np.ndarray, " n"]:
    """Compute the highest true positive rate under (epsilon, delta)-DP (Kairouz, Oh and Viswanath, 2015)."""
    rising = np.exp(min(epsilon, 700.0)) * fpr + delta
    falling = 1 - np.exp(-epsilon) * (1 - delta - fpr)
    return np.clip(np.minimum(rising, falling), 0, 1)


def guarantee(settings: PrivacySettings, mechanism: GaussianMechanism | None) -> Guarantee:
    """Describe the guarantee of one release with these settings.

    Args:
        mechanism: the one that the settings ask for; None without privacy.
    """
    return Guarantee(
        unit=RECORD if settings.unit_column is None else f"all records with the same {settings.unit_column!r}",
        epsilon=settings.epsilon,
        delta=mechanism.delta if mechanism else None,
        adjacency=settings.adjacency,
        clipping_norm=settings.clipping_norm,
        sensitivity=mechanism.sensitivity if mechanism else None,
        sigma=mechanism.sigma if mechanism else None,
        calibration=settings.calibration if mechanism else None,
        accountant=_accountant(mechanism),
        sampler=mechanism.sampler if mechanism else None,
        releases=1,
        composed_epsilon=mechanism.epsilon if mechanism else None,
        safe=mechanism is not None and mechanism.safe,
        mu=mechanism and mechanism.sensitivity / mechanism.sigma,
    )


def _accountant(mechanism: GaussianMechanism | None) -> str:
    if mechanism is None:
        return "none"
    if mechanism.discrete:
        return (
            f"zero-concentrated DP (Canonne, Kamath and Steinke, 2020), dp-accounting {version('dp-accounting')}"
        )
    exact = "analytic Gaussian mechanism (Balle and Wang, 2018)"
    if mechanism.calibration == "paper":
        return f"formula of Dwork and Roth (2014), checked by the {exact}"
    return f"{exact}, dp-accounting {version('dp-accounting')}"
