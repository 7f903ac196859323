"""Certify lower bounds on epsilon from the scores of releases with and without a canary.

A test for the canary with rates TPR and FPR satisfies TPR <= e^eps FPR + delta (Kairouz, Oh and Viswanath, 2015).
The rates have exact confidence bounds (Clopper and Pearson, 1934), combined as by Nasr et al. (2021).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr
from scipy.stats import beta

from gradmm.errors import InputError

#: Share of the error probability that is given to the test planned before the draws.
PLANNED_SHARE = 0.8


def clopper_pearson(
    successes: Float[np.ndarray, " counts"], trials: int, confidence: float, side: Literal["lower", "upper"]
) -> Float[np.ndarray, " counts"]:
    """Compute one-sided exact bounds on success probabilities from counts (Clopper and Pearson, 1934).

    Fractional counts are interpolated; expected counts need this.
    """
    error, failures = 1 - confidence, trials - successes
    if side == "lower":
        return np.where(successes <= 0, 0.0, beta.ppf(error, np.maximum(successes, 1e-300), failures + 1))
    return np.where(failures <= 0, 1.0, beta.isf(error, successes + 1, np.maximum(failures, 1e-300)))


def certified_epsilon(
    without: Float[np.ndarray, " without"],
    with_: Float[np.ndarray, " with"],
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> float:
    """Compute a lower bound on epsilon, at least 0, that is too large with probability at most 1 - confidence.

    The draws must be independent; the scores may have any distribution. One half of the draws chooses the test:
    the threshold, the side that rejects, and which of the two is the null hypothesis. On the other half, the
    test's TPR and FPR are bounded, each at half of the error probability; then
    epsilon >= log((TPR - delta) / FPR).

    Args:
        threshold: a threshold chosen before the draws. It is also tested on all draws, at `PLANNED_SHARE` of the
            error probability; the canary must then have been included by fair coins.

    Raises:
        InputError: for fewer than two draws with or without the canary, or scores that are not finite.
    """
    check_finite(without, with_)
    _check_draws(min(len(without), len(with_)))
    error = 1 - confidence
    if threshold is None:
        return max(0.0, _chosen_test_bound(without, with_, delta, error))
    false_positives, true_positives = (np.array([np.sum(s > threshold)], float) for s in (without, with_))
    releases = len(without) + len(with_)
    planned = _coin_bounds(false_positives, true_positives, releases, delta, PLANNED_SHARE * error)
    chosen = _chosen_test_bound(without, with_, delta, (1 - PLANNED_SHARE) * error)
    return max(0.0, float(planned[0]), chosen)


def _chosen_test_bound(
    without: Float[np.ndarray, " without"], with_: Float[np.ndarray, " with"], delta: float, error: float
) -> float:
    halves = [(scores[: len(scores) // 2], scores[len(scores) // 2 :]) for scores in (without, with_)]
    (choosing_without, other_without), (choosing_with, other_with) = halves
    tests = [
        _best_test(choosing_without, choosing_with, null, sign, delta, 1 - error)
        for null in ("without", "with")
        for sign in (1, -1)
    ]
    best = max(tests, key=lambda test: test.bound)
    null, alternative = _sorted_scores(other_without, other_with, best.null, best.sign)
    return float(_epsilon_bounds(null, alternative, np.array([best.threshold]), delta, 1 - error)[0])


def _coin_bounds(
    false_positives: Float[np.ndarray, " tests"],
    true_positives: Float[np.ndarray, " tests"],
    releases: int,
    delta: float,
    error: float,
) -> Float[np.ndarray, " tests"]:
    """Compute lower bounds on epsilon from tests fixed in advance, if fair coins include the canary.

    Given that a test rejects s releases, the number of those with the canary is Binomial(s, q) with
    q = TPR / (TPR + FPR), and e^eps >= (TPR - delta) / FPR = (q - delta / (TPR + FPR)) / (1 - q). One bound on the
    ratio is tighter than two bounds on its parts.
    """
    rejected = false_positives + true_positives
    share = np.zeros_like(rejected)
    seen = rejected > 0
    share[seen] = beta.ppf(0.8 * error, np.maximum(true_positives, 1e-300), false_positives + 1)[seen]
    both = 2 * clopper_pearson(rejected, releases, 1 - 0.2 * error, "lower")  # TPR + FPR
    odds = np.maximum(share - delta / np.maximum(both, 1e-300), 1e-300) / (1 - share)
    return np.log(odds)


def _expected_counts(
    noise_multiplier: float, draws: int
) -> tuple[Float[np.ndarray, " tests"], Float[np.ndarray, " tests"], Float[np.ndarray, " tests"]]:
    """Return thresholds in sensitivities, and a Gaussian mechanism's expected false and true positives at each."""
    shift = 1 / noise_multiplier
    # From rates of nearly 1 to rates of less than one draw.
    thresholds = np.linspace(-8.0, 8.0 + shift, 4001)
    return thresholds * noise_multiplier, draws * ndtr(-thresholds), draws * ndtr(shift - thresholds)


def planned_threshold(noise_multiplier: float, delta: float, draws: int) -> float:
    """Choose the best threshold for a Gaussian mechanism, in sensitivities.

    It is optimised for an error probability of 1e-4, which avoids thresholds that only a few draws pass.
    """
    thresholds, false_positives, true_positives = _expected_counts(noise_multiplier, draws)
    bounds = _coin_bounds(false_positives, true_positives, 2 * draws, delta, 1e-4)
    return float(thresholds[np.argmax(bounds)])


def expected_certified_epsilon(
    noise_multiplier: float, delta: float, draws: int, confidence: float = 0.95
) -> float:
    """Compute `certified_epsilon` of a Gaussian mechanism at the planned threshold, for the expected counts.

    Args:
        noise_multiplier: sigma / sensitivity.
        draws: releases with the canary, and as many without it.
    """
    _check_draws(draws)
    thresholds, false_positives, true_positives = _expected_counts(noise_multiplier, draws)
    bounds = _coin_bounds(false_positives, true_positives, 2 * draws, delta, PLANNED_SHARE * (1 - confidence))
    return max(0.0, float(bounds[thresholds == planned_threshold(noise_multiplier, delta, draws)][0]))


def largest_certifiable_epsilon(delta: float, draws: int, confidence: float = 0.95) -> float:
    """Compute the largest possible `certified_epsilon`, of draws that are all told apart."""
    _check_draws(draws)
    told_apart = (np.zeros(1), np.full(1, float(draws)))
    planned = _coin_bounds(*told_apart, 2 * draws, delta, PLANNED_SHARE * (1 - confidence))
    return max(0.0, float(planned[0]))


def check_finite(*scores: Float[np.ndarray, " _"]) -> None:
    """Raise an InputError if a score is not finite."""
    if not all(np.isfinite(values).all() for values in scores):
        raise InputError("some scores are not finite", "mechanism_audit", "look for overflow")


def _check_draws(draws: int) -> None:
    if draws < 2:
        raise InputError(
            f"{draws} draws are too few", "mechanism_audit", "use at least two, to choose a test and to apply it"
        )


class _Test(NamedTuple):
    """A test that rejects the null hypothesis, "without" or "with", if sign x score > threshold."""

    bound: float
    null: str
    sign: int
    threshold: float


def _best_test(
    without: Float[np.ndarray, " without"],
    with_: Float[np.ndarray, " with"],
    null: str,
    sign: int,
    delta: float,
    confidence: float,
) -> _Test:
    """Choose the test with the largest bound. Each gets an equal share of the error, against lucky tails."""
    null_scores, alternative_scores = _sorted_scores(without, with_, null, sign)
    thresholds = _thresholds(null_scores, alternative_scores)
    each = 1 - (1 - confidence) / (4 * len(thresholds))
    bounds = _epsilon_bounds(null_scores, alternative_scores, thresholds, delta, each)
    best = int(np.argmax(bounds))
    return _Test(float(bounds[best]), null, sign, float(thresholds[best]))


def _sorted_scores(
    without: Float[np.ndarray, " without"], with_: Float[np.ndarray, " with"], null: str, sign: int
) -> tuple[Float[np.ndarray, " null"], Float[np.ndarray, " alternative"]]:
    """Return the scores of the null hypothesis and of the alternative, ascending, with signs such that high ones
    reject."""
    without, with_ = np.sort(sign * without), np.sort(sign * with_)
    return (without, with_) if null == "without" else (with_, without)


def _thresholds(
    null: Float[np.ndarray, " null"], alternative: Float[np.ndarray, " alternative"]
) -> Float[np.ndarray, " thresholds"]:
    """Place thresholds midway between neighbouring scores, at geometrically spaced ranks from both ends."""
    count = min(len(null), len(alternative))
    ranks = np.unique(np.geomspace(1, count, min(count, 300)).astype(int)) - 1
    scores = np.unique(
        np.concatenate([null[ranks], null[-1 - ranks], alternative[ranks], alternative[-1 - ranks]])
    )
    return (scores[1:] + scores[:-1]) / 2 if len(scores) > 1 else scores


def _epsilon_bounds(
    null: Float[np.ndarray, " null"],
    alternative: Float[np.ndarray, " alternative"],
    thresholds: Float[np.ndarray, " thresholds"],
    delta: float,
    confidence: float,
) -> Float[np.ndarray, " thresholds"]:
    """Compute the lower bound on epsilon of the test at each threshold, from sorted scores."""
    false_positives, true_positives = (
        (len(scores) - np.searchsorted(scores, thresholds, side="right")).astype(float)
        for scores in (null, alternative)
    )
    return _bounds_of_counts(false_positives, true_positives, len(null), len(alternative), delta, confidence)


def _bounds_of_counts(
    false_positives: Float[np.ndarray, " tests"],
    true_positives: Float[np.ndarray, " tests"],
    negatives: int,
    positives: int,
    delta: float,
    confidence: float,
) -> Float[np.ndarray, " tests"]:
    """Compute log((TPR - delta) / FPR) with both rates at their bounds; very negative if TPR is below delta."""
    each = 1 - (1 - confidence) / 2
    largest_fpr = clopper_pearson(false_positives, negatives, each, "upper")
    smallest_tpr = clopper_pearson(true_positives, positives, each, "lower")
    return np.log(np.maximum(smallest_tpr - delta, 1e-300)) - np.log(largest_fpr)
