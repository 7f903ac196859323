"""Check what a release does to canaries: how far one moves the sums, and how large and independent the noise is.

The audit knows its canaries, so it sees the noiseless sums and the noise itself, which no attacker does. These
checks therefore find bugs at any epsilon, also where an attack could certify nothing. The limits are exact for
independent normal noise; discrete Gaussian noise, whose grid is much finer than sigma, differs negligibly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import chi2, norm

from gradmm.audits.canaries import CANARY_NORM, CanaryRelease
from gradmm.config.settings import Settings
from gradmm.privacy.mechanism import SUM_SLACK, GaussianMechanism, gaussian_delta

#: Coordinates of a part that are kept from each release, to be compared with those of others.
KEPT = 256

#: The discrete sampler's grid shortens a vector by less than this share.
GRID_LOSS = 1e-3


class Check(Settings):
    """A measured value, and the range of a correct mechanism.

    Attributes:
        part: of the release; None for all of it.
        draws: the number of records or noise values that were measured.
    """

    test: Literal["sensitivity", "noise", "correlation"]
    part: str | None = None
    draws: int
    measured: float
    low: float
    high: float

    @property
    def passes(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def extremity(self) -> float:
        """The distance from the middle of the range, in half-widths; above 1 outside."""
        middle, half_width = (self.high + self.low) / 2, (self.high - self.low) / 2
        return abs(self.measured - middle) / half_width


def required_sigma(claim: GaussianMechanism) -> float:
    """Compute the noise's standard deviation from the claim, without the code that the mechanism takes it from."""
    sensitivity = claim.clipping_norm * (2.0 if claim.adjacency == "replace" else 1.0)
    if claim.calibration == "paper":
        return sensitivity * math.sqrt(2 * math.log(1.25 / claim.delta)) / claim.epsilon
    delta_of = zcdp_delta if claim.discrete else gaussian_delta

    def excess(log_multiplier: float) -> float:
        return delta_of(math.exp(log_multiplier), claim.epsilon) - claim.delta

    log_multiplier: float = brentq(excess, -20.0, 20.0, xtol=1e-12)  # pyright: ignore
    return sensitivity * math.exp(log_multiplier)


def zcdp_delta(multiplier: float, epsilon: float) -> float:
    """Compute delta at epsilon of rho-zCDP with rho = 1 / (2 multiplier^2) (Canonne et al. 2020, Corollary 13).

    The smallest over orders a > 1 of exp((a - 1)(a rho - epsilon)) / (a - 1) * (1 - 1/a)^a.
    """
    rho = 0.5 / multiplier**2

    def log_delta(log_excess: float) -> float:
        a = 1 + math.exp(log_excess)
        return (a - 1) * (a * rho - epsilon) - math.log(a - 1) + a * math.log1p(-1 / a)

    # A grid finds the valley, in which the function is convex.
    grid = np.linspace(-12.0, 24.0, 400)
    best = float(grid[np.argmin([log_delta(each) for each in grid])])
    found = minimize_scalar(log_delta, bounds=(best - 0.1, best + 0.1), method="bounded", options={"xatol": 1e-9})
    return math.exp(min(0.0, float(found.fun)))


def check_sensitivity(release: CanaryRelease, rng: np.random.Generator) -> Check:
    """Measure the largest distance by which one unit moves the noiseless sums of several, in clipping norms.

    Its records are long in all parts, in one part only, short, short before the centre is subtracted, or not
    finite in a part; the last must not move the sums. A record that is not present must not either, else the
    distance is infinite. A unit has one record, of either class, or one of each.
    """
    direction = torch.from_numpy(rng.normal(size=release.gradients.shape[1:]))
    features = torch.from_numpy(rng.normal(size=release.canaries))
    direction, features = direction / direction.norm(), features / features.norm()
    clipping_norm = release.mechanism.clipping_norm
    usual = CANARY_NORM * clipping_norm * direction
    vectors = [
        (usual, CANARY_NORM * features, CANARY_NORM * features),
        (1e6 * usual, 0.0 * features, 0.0 * features),
        (0.0 * usual, CANARY_NORM * features, 0.0 * features),
        (0.0 * usual, 0.0 * features, CANARY_NORM * features),
        (0.05 * usual, 0.5 * features, 0.5 * features),
        (-release.centre, features, features),
        (math.inf * usual, features, features),
        (usual, math.nan * features, features),
        (usual, features, math.nan * features),
    ]
    others = min(8, release.canaries)
    vectors_of_others = release.gradients[:others], release.features[:others], release.features[:others]
    labels_of_others = release.labels[:others]
    all_present = torch.ones(others, dtype=torch.bool)
    fewer = release.clean(release.sums_of(*vectors_of_others, labels_of_others, all_present))
    moved = []
    for present, of_unit, classes in product((True, False), vectors, ([0], [1], [0, 1])):
        own = len(classes)
        gradients, rows, tokens = (
            torch.cat([theirs, vector.expand(own, *vector.shape)])
            for theirs, vector in zip(vectors_of_others, of_unit, strict=True)
        )
        labels = np.append(labels_of_others, classes)
        counted = torch.cat([all_present, torch.full((own,), present)])
        share = torch.cat([torch.ones(others), torch.full((own,), 1 / own)]).double()
        more = release.clean(release.sums_of(gradients, rows, tokens, labels, counted, share))
        distances = [float(np.linalg.norm(more[part] - fewer[part])) for part in more]
        distance = math.hypot(*distances) / clipping_norm
        moved.append(math.inf if distance > SUM_SLACK and not present else distance)
    high = 1.0 if release.mechanism.discrete else 1 + SUM_SLACK
    return Check(test="sensitivity", draws=len(moved), measured=_largest(moved), low=1 - GRID_LOSS, high=high)


@dataclass
class NoiseSample:
    """The noise of several releases, by part.

    Attributes:
        sigma: the standard deviation that the claim requires.
    """

    sigma: float
    _squares: dict[str, float] = field(default_factory=dict)
    _draws: dict[str, int] = field(default_factory=dict)
    _kept: dict[str, list[Float[np.ndarray, " kept"]]] = field(default_factory=dict)

    def add(self, noise: Mapping[str, Float[np.ndarray, " _"]]) -> None:
        """Add one release's noise."""
        for part, values in noise.items():
            self._squares[part] = self._squares.get(part, 0.0) + float(np.square(values / self.sigma).sum())
            self._draws[part] = self._draws.get(part, 0) + len(values)
            self._kept.setdefault(part, []).append(values[:KEPT] / self.sigma)

    def checks(self, confidence: float) -> list[Check]:
        """Return all checks. Independent noise of the required size fails with probability 2 (1 - confidence)."""
        return [*self._deviations(confidence), self._correlation(confidence)]

    def _deviations(self, confidence: float) -> list[Check]:
        """Check each part's standard deviation by the chi-squared distribution of its sum of squares."""
        tail = (1 - confidence) / (2 * len(self._squares))
        return [
            Check(
                test="noise",
                part=part,
                draws=draws,
                measured=math.sqrt(self._squares[part] / draws),
                low=math.sqrt(chi2.ppf(tail, draws) / draws),
                high=math.sqrt(chi2.isf(tail, draws) / draws),
            )
            for part, draws in self._draws.items()
        ]

    def _correlation(self, confidence: float) -> Check:
        """Compare parts, neighbouring coordinates, successive releases, and any two releases."""
        parts = [np.stack(values) for values in self._kept.values()]
        scores = [_score(first, second) for first, second in combinations(parts, 2)]
        for values in parts:
            scores += [_score(values[:, 1:], values[:, :-1]), _score(values[1:], values[:-1])]
        whole = np.concatenate(parts, axis=1)
        lengths = np.linalg.norm(whole, axis=1, keepdims=True)
        pairs = whole / np.maximum(lengths, np.finfo(float).tiny) @ whole.T
        scores = np.concatenate([scores, pairs[np.triu_indices(len(whole), k=1)]])
        limit = float(norm.isf((1 - confidence) / (2 * len(scores))))
        largest = _largest(np.abs(scores))
        return Check(test="correlation", draws=len(scores), measured=largest, low=0.0, high=limit)


def _score(first: Float[np.ndarray, "releases _"], second: Float[np.ndarray, "releases _"]) -> float:
    """Compute <x, y> / |x|, which is standard normal for any x if y is independent of it."""
    width = min(first.shape[1], second.shape[1])
    first, second = first[:, :width], second[:, :width]
    length = float(np.linalg.norm(first))
    return float((first * second).sum()) / length if length else 0.0


def _largest(values: list[float] | np.ndarray) -> float:
    """Return the largest value; infinity if one is not a number, since no comparison holds for it."""
    return math.inf if np.isnan(values).any() else float(np.max(values))
