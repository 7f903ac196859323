"""The audit with power: canary gradients through the clipping and the noise, and the epsilon they certify.

It attacks the mechanism alone, with gradients of its own making, so it needs no private data. It finds *lower*
bounds on epsilon: one above the claim shows a bug; one below it proves nothing, except that a bug of the size
that the audit can see (the expected bounds and the largest ones say which) is not there.

Repeated draws: many releases, each with a canary or without it by a fair coin. A test for the canary with rates
TPR and FPR has TPR <= e^eps FPR + delta (Kairouz, Oh and Viswanath, 2015), and rates have exact bounds (Clopper
and Pearson, 1934; put together as by Nasr et al., 2021).

One run: many canaries, each in or out by a fair coin, guessed from one release (Steinke, Nasr and Jagielski,
2023). It needs one release only, and certifies less.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.optimize import root_scalar
from scipy.special import expit, ndtr
from scipy.stats import beta, binom

from gradmm_core.errors import InputError
from gradmm_core.mia_audit import attack
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.settings import Settings

COLUMNS = [
    "test",
    "canaries",
    "draws",
    "guesses",
    "correct",
    "certified_epsilon",
    "expected_certified_epsilon",
    "claimed_epsilon",
    "delta",
    "confidence",
    "auc",
    "tpr_at_1_fpr",
    "tpr_at_01_fpr",
]

#: A canary's norm in clipping norms, before it is clipped: without clipping it is seen this much better.
CANARY_NORM = 10.0

#: The part of the error probability that goes to the test that was planned before the draws.
PLANNED_SHARE = 0.8

#: How many numbers of noise are held at a time (8 MB).
CHUNK_NUMBERS = 2**20


@runtime_checkable
class MechanismUnderTest(Protocol):
    """The two steps of a release, as flat vectors of `dims` numbers; the base data may be any, or none."""

    @property
    def dims(self) -> int: ...

    def sum_of(self, records: Float[np.ndarray, "records dims"]) -> Float[np.ndarray, " dims"]:
        """The noiseless sum of the base data's gradients and these, each clipped. There may be no records."""
        ...

    def noise(self, count: int) -> Float[np.ndarray, "count dims"]:
        """The noise of `count` releases, drawn as releases draw it."""
        ...


class RocFigures(TypedDict):
    """Area under the ROC curve, and the largest TPR at an FPR of at most 1% and 0.1%."""

    auc: float
    tpr_at_1_fpr: float
    tpr_at_01_fpr: float


class MechanismTest(Settings):
    """What one test certified, at its own `confidence`, and what it could expect of a correct mechanism.

    `RocFigures` are of the scores, between the releases (in one run: the canaries) with and without. They are
    estimates, without a confidence.
    """

    test: Literal["repeated draws", "one run"]
    canaries: int
    draws: int
    guesses: int | None = None
    correct: int | None = None
    certified_epsilon: float
    expected_certified_epsilon: float
    claimed_epsilon: float
    delta: float
    confidence: float
    auc: float
    tpr_at_1_fpr: float
    tpr_at_01_fpr: float

    @property
    def passes(self) -> bool:
        """True if what was certified is no more than what was claimed."""
        return self.certified_epsilon <= self.claimed_epsilon


class MechanismAudit(Settings):
    """Both tests of a mechanism."""

    repeated_draws: MechanismTest
    one_run: MechanismTest

    @property
    def passes(self) -> bool:
        """True if both tests pass. A correct mechanism fails with a probability of at most 2 (1 - confidence).

        Of the repeated draws' share next to nothing is used up, of the one run's nearly all where epsilon is
        so small that it is a matter of coins: 5% of correct mechanisms with epsilon 0.05 fail at 95%.
        """
        return self.repeated_draws.passes and self.one_run.passes

    def as_frame(self) -> pd.DataFrame:
        """A row for each test, with the columns `COLUMNS`; repeated draws have no guesses (missing integers)."""
        rows = [test.model_dump() for test in (self.repeated_draws, self.one_run)]
        return pd.DataFrame(rows, columns=COLUMNS).astype({"guesses": "Int64", "correct": "Int64"})


def mechanism_audit(
    mechanism: MechanismUnderTest,
    claim: GaussianMechanism,
    draws: int = 100_000,
    canaries: int = 500,
    guesses: int = 100,
    confidence: float = 0.95,
    seed: int = 0,
) -> MechanismAudit:
    """Hands canaries to the mechanism, and compares what their scores certify with the claim.

    Canaries have random directions and `CANARY_NORM` times the claimed clipping norm. Where the claim is about
    replacing a record, a canary that is not there is replaced by its negative.

    Args:
        claim: epsilon, delta, clipping norm and adjacency are tested; sigma only makes the expected bounds.
        draws: releases with the canary, and as many without it, on average.
        canaries, guesses: those of the one run. With no more canaries than dimensions they are orthogonal; with
            more they blur one another, and bugs in the clipping hardly show in the one run.
        seed: for directions and coins, which the mechanism must not know; the noise is the mechanism's own.

    Raises:
        InputError: with fewer than two draws, more guesses than canaries, no canary in or none out by the coins,
            or scores that are not finite.
    """
    rng = np.random.default_rng(seed)
    noise_multiplier = claim.sigma / claim.sensitivity
    outcome = partial(MechanismTest, claimed_epsilon=claim.epsilon, delta=claim.delta, confidence=confidence)

    without, with_ = repeated_scores(mechanism, claim, draws, rng)
    threshold = claim.sensitivity * planned_threshold(noise_multiplier, claim.delta, draws)
    repeated_draws = outcome(
        test="repeated draws",
        canaries=1,
        draws=draws,
        certified_epsilon=certified_epsilon(without, with_, claim.delta, confidence, threshold),
        expected_certified_epsilon=expected_certified_epsilon(noise_multiplier, claim.delta, draws, confidence),
        **roc_figures(without, with_),
    )

    included, scores = one_run_scores(mechanism, claim, canaries, rng)
    correct = correct_guesses(included, scores, guesses)
    expected = math.floor(expected_correct_guesses(canaries, guesses, mechanism.dims, noise_multiplier))
    one_run = outcome(
        test="one run",
        canaries=canaries,
        draws=1,
        guesses=guesses,
        correct=correct,
        certified_epsilon=one_run_epsilon(canaries, guesses, correct, claim.delta, confidence),
        expected_certified_epsilon=one_run_epsilon(canaries, guesses, expected, claim.delta, confidence),
        **roc_figures(scores[~included], scores[included]),
    )
    return MechanismAudit(repeated_draws=repeated_draws, one_run=one_run)


def repeated_scores(
    mechanism: MechanismUnderTest, claim: GaussianMechanism, draws: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, " without"], Float[np.ndarray, " with"]]:
    """Scores of the releases without one canary, and with it: twice `draws` in all, each by a fair coin.

    A score is a release's projection on the canary's direction, less that of the noiseless sum without it. The
    releases are projected in chunks, and never held whole. Noise that comes twice, as from a seed, is no secret:
    it is taken off the score. (Of 100,000 correct draws, two are the same with a probability of about 1e-6.)
    """
    direction = _directions(1, mechanism.dims, rng)
    canary = CANARY_NORM * claim.clipping_norm * direction
    absent = mechanism.sum_of(_when_absent(canary, claim))
    shift = float((mechanism.sum_of(canary) - absent) @ direction[0])
    # In two goes at least, so that a seed shows.
    noise = np.concatenate([_projected_noise(mechanism, direction[0], draws) for _ in range(2)])
    included = rng.random(2 * draws) < 0.5
    _, which, counts = np.unique(noise, return_inverse=True, return_counts=True)
    noise[counts[which] > 1] = 0.0
    return noise[~included], noise[included] + shift


def one_run_scores(
    mechanism: MechanismUnderTest, claim: GaussianMechanism, canaries: int, rng: np.random.Generator
) -> tuple[Bool[np.ndarray, " canaries"], Float[np.ndarray, " canaries"]]:
    """Which canaries fair coins put into one release, and each one's score there.

    A score is the projection on the canary's direction of the release, less the noiseless sum's expectation
    over the coins: half-way between all canaries in and all out.
    """
    directions = _directions(canaries, mechanism.dims, rng)
    present = CANARY_NORM * claim.clipping_norm * directions
    included = rng.random(canaries) < 0.5
    records = np.concatenate([present[included], _when_absent(present[~included], claim)])
    release = mechanism.sum_of(records) + mechanism.noise(1)[0]
    expectation = (mechanism.sum_of(present) + mechanism.sum_of(_when_absent(present, claim))) / 2
    return included, directions @ (release - expectation)


def correct_guesses(
    included: Bool[np.ndarray, " canaries"], scores: Float[np.ndarray, " canaries"], guesses: int
) -> int:
    """How many of `guesses` are right: the canaries with the highest scores are in, the lowest out, half each.

    Raises:
        InputError: with more guesses than canaries, or scores that are not finite.
    """
    _check_finite(scores)
    _check_guesses(len(scores), guesses)
    order = np.argsort(scores)
    lowest, highest = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    return int(np.sum(~included[lowest]) + np.sum(included[highest]))


def clopper_pearson(
    successes: Float[np.ndarray, " counts"], trials: int, confidence: float, side: Literal["lower", "upper"]
) -> Float[np.ndarray, " counts"]:
    """One-sided exact bounds on the probabilities of so many successes each (Clopper and Pearson, 1934).

    Numbers of successes between the whole ones are interpolated, for expected numbers.
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
    """A lower bound on epsilon, at least 0: too large with a probability of at most 1 - confidence.

    For independent draws, whatever the scores are. One half of the draws chooses the test: the threshold, the
    side of it that rejects, and which of the two is the null hypothesis. The other half has this test's TPR and
    FPR bounded, each at half of the error probability; then epsilon >= log((TPR - delta) / FPR).

    Args:
        threshold: one chosen before the draws were seen. It is tried on all of them too, for four fifths of the
            error probability; the coins that put the canary in have to be fair then.

    Raises:
        InputError: with fewer than two draws of a kind, or scores that are not finite.
    """
    _check_finite(without, with_)
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
    """The lower bound on epsilon of tests that were chosen beforehand, on releases with the canary by fair coins.

    Of the s releases that a test rejects, those with the canary are Binomial(s, q), q = TPR / (TPR + FPR), and
    e^eps >= (TPR - delta) / FPR = (q - delta / (TPR + FPR)) / (1 - q). One bound on a ratio is worth more than
    two on its parts.
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
    """Thresholds in sensitivities, and the false and true positives that a Gaussian mechanism gives them."""
    shift = 1 / noise_multiplier
    # From a TPR and FPR of nearly 1 to those of less than one draw.
    thresholds = np.linspace(-8.0, 8.0 + shift, 4001)
    return thresholds * noise_multiplier, draws * ndtr(-thresholds), draws * ndtr(shift - thresholds)


def planned_threshold(noise_multiplier: float, delta: float, draws: int) -> float:
    """The best threshold for a Gaussian mechanism, in sensitivities.

    At an error of one in ten thousand, so that it does not rest on a handful of draws.
    """
    thresholds, false_positives, true_positives = _expected_counts(noise_multiplier, draws)
    bounds = _coin_bounds(false_positives, true_positives, 2 * draws, delta, 1e-4)
    return float(thresholds[np.argmax(bounds)])


def expected_certified_epsilon(
    noise_multiplier: float, delta: float, draws: int, confidence: float = 0.95
) -> float:
    """What `certified_epsilon` makes of a Gaussian mechanism at the planned threshold, if rates are as expected.

    Args:
        noise_multiplier: sigma / sensitivity.
        draws: releases with the canary, and as many without it.
    """
    _check_draws(draws)
    thresholds, false_positives, true_positives = _expected_counts(noise_multiplier, draws)
    bounds = _coin_bounds(false_positives, true_positives, 2 * draws, delta, PLANNED_SHARE * (1 - confidence))
    return max(0.0, float(bounds[thresholds == planned_threshold(noise_multiplier, delta, draws)][0]))


def largest_certifiable_epsilon(delta: float, draws: int, confidence: float = 0.95) -> float:
    """What `certified_epsilon` gives at best: every draw told apart. The most that any bug can show as."""
    _check_draws(draws)
    told_apart = (np.zeros(1), np.full(1, float(draws)))
    planned = _coin_bounds(*told_apart, 2 * draws, delta, PLANNED_SHARE * (1 - confidence))
    return max(0.0, float(planned[0]))


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon, at least 0, that `correct` of `guesses` rule out: a lower bound at the confidence.

    Steinke, Nasr and Jagielski (2023), theorem 5.2. At best it is that of all guesses being right.

    Raises:
        InputError: unless 0 <= correct <= guesses <= canaries.
    """
    _check_guesses(canaries, guesses, correct)

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    if excess(0.0) > 0:
        return 0.0
    above = 1.0
    while excess(above) <= 0:
        above *= 2
    return float(root_scalar(excess, bracket=(0.0, above), xtol=1e-12).root)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """A bound on the probability that an (epsilon, delta)-DP mechanism has `correct` right guesses or more.

    With W right guesses of randomised response, Binomial(guesses, e^eps / (1 + e^eps)), it is

        P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i,  i = 1, ..., v

    for v correct guesses on m canaries (Steinke, Nasr and Jagielski, 2023, theorem 5.2).
    """
    rate = expit(epsilon)
    reached = float(binom.sf(correct - 1, guesses, rate))
    if correct == 0:
        return reached
    # Those just below v first: the means of the first one, two, ... probabilities.
    below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate)
    means = np.cumsum(below) / np.arange(1, correct + 1)
    return min(1.0, reached + 2 * canaries * delta * float(means.max()))


def expected_correct_guesses(canaries: int, guesses: int, dims: int, noise_multiplier: float) -> float:
    """How many guesses `correct_guesses` gets right on average of a Gaussian mechanism, for many canaries.

    In sensitivities, a score is +1/2 (in) or -1/2 (out), plus noise, plus, where there are more canaries than
    dimensions, the other canaries' parts in its direction: normal, of variance (canaries - 1) / (4 dims).
    """
    _check_guesses(canaries, guesses)
    others = (canaries - 1) / (4 * dims) if canaries > dims else 0.0
    deviation = math.sqrt(noise_multiplier**2 + others)
    share = guesses / (2 * canaries)

    def in_and_above(threshold: float) -> float:
        return float(ndtr((0.5 - threshold) / deviation)) / 2

    def excess(threshold: float) -> float:
        return in_and_above(threshold) + float(ndtr((-0.5 - threshold) / deviation)) / 2 - share

    # At 0 half of all scores are above: as many as can be guessed to be in.
    if guesses == canaries:
        threshold = 0.0
    else:
        threshold = float(root_scalar(excess, bracket=(0.0, 0.5 + 40 * deviation)).root)
    return guesses * in_and_above(threshold) / share


def roc_figures(without: Float[np.ndarray, " without"], with_: Float[np.ndarray, " with"]) -> RocFigures:
    """The figures of calling high scores "with".

    Raises:
        InputError: if there is none of one kind.
    """
    if not (len(without) and len(with_)):
        raise InputError("there are no scores of one kind", "mechanism_audit", "use more canaries or draws")
    figures = attack(-with_, -without, 0.0)
    return RocFigures(
        auc=figures["auc"], tpr_at_1_fpr=figures["tpr_at_1_fpr"], tpr_at_01_fpr=figures["tpr_at_01_fpr"]
    )


class _Test(NamedTuple):
    """Reject the null hypothesis, "without" or "with", if sign x score > threshold."""

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
    """The one with the largest bound, each with its share of the error, so that no lucky tail is chosen."""
    null_scores, alternative_scores = _sorted_scores(without, with_, null, sign)
    thresholds = _thresholds(null_scores, alternative_scores)
    each = 1 - (1 - confidence) / (4 * len(thresholds))
    bounds = _epsilon_bounds(null_scores, alternative_scores, thresholds, delta, each)
    best = int(np.argmax(bounds))
    return _Test(float(bounds[best]), null, sign, float(thresholds[best]))


def _sorted_scores(
    without: Float[np.ndarray, " without"], with_: Float[np.ndarray, " with"], null: str, sign: int
) -> tuple[Float[np.ndarray, " null"], Float[np.ndarray, " alternative"]]:
    """The null hypothesis' scores and the alternative's, so that high ones reject, in ascending order."""
    without, with_ = np.sort(sign * without), np.sort(sign * with_)
    return (without, with_) if null == "without" else (with_, without)


def _thresholds(
    null: Float[np.ndarray, " null"], alternative: Float[np.ndarray, " alternative"]
) -> Float[np.ndarray, " thresholds"]:
    """Half-way between neighbouring scores, of those at geometrically spaced ranks from both ends of each."""
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
    """The lower bound on epsilon of the test at each threshold; the scores are sorted."""
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
    """log((TPR - delta) / FPR) with both rates at their bounds; hugely negative where the TPR is below delta."""
    each = 1 - (1 - confidence) / 2
    largest_fpr = clopper_pearson(false_positives, negatives, each, "upper")
    smallest_tpr = clopper_pearson(true_positives, positives, each, "lower")
    return np.log(np.maximum(smallest_tpr - delta, 1e-300)) - np.log(largest_fpr)


def _directions(count: int, dims: int, rng: np.random.Generator) -> Float[np.ndarray, "count dims"]:
    """Unit vectors in random directions: orthogonal ones, unless there are more than dimensions."""
    normal = rng.normal(size=(count, dims))
    if count > dims:
        return normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return np.linalg.qr(normal.T).Q.T


def _when_absent(
    canaries: Float[np.ndarray, "canaries dims"], claim: GaussianMechanism
) -> Float[np.ndarray, "records dims"]:
    """What is in these canaries' places when they are out: nothing, or their negatives if records are replaced."""
    return -canaries if claim.adjacency == "replace" else canaries[:0]


def _projected_noise(
    mechanism: MechanismUnderTest, direction: Float[np.ndarray, " dims"], draws: int
) -> Float[np.ndarray, " draws"]:
    projected = np.empty(draws)
    chunk = max(1, CHUNK_NUMBERS // len(direction))
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        projected[start : start + count] = mechanism.noise(count) @ direction
    return projected


def _check_finite(*scores: Float[np.ndarray, " _"]) -> None:
    if not all(np.isfinite(values).all() for values in scores):
        raise InputError("there are scores that are not finite", "mechanism_audit", "look for overflow")


def _check_draws(draws: int) -> None:
    if draws < 2:
        raise InputError(
            f"{draws} draws are too few", "mechanism_audit", "it takes two, to choose a test and to use it"
        )


def _check_guesses(canaries: int, guesses: int, correct: int = 0) -> None:
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise InputError(
            f"{correct} right of {guesses} guesses on {canaries} canaries",
            "mechanism_audit",
            "there must be a guess, and no more of them than canaries",
        )
