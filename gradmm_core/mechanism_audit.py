"""The audit with power: canary gradients through the clipping and the noise, and the epsilon they certify.

It attacks the mechanism alone, with gradients of its own making, so it needs no private data. It finds *lower*
bounds on epsilon: one above the claim shows a bug; one below it proves nothing, except that a bug of the size
that the audit can see (the expected bounds and the largest ones say which) is not there.

Repeated draws: many releases, each with a canary or without it by a fair coin (`certified_epsilon`).
One run: many canaries, each in or out by a fair coin, guessed from one release (`one_run_epsilon`). It needs one
release only, and certifies less.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, Protocol, TypedDict, runtime_checkable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from gradmm_core.certified_epsilon import (
    certified_epsilon,
    check_finite,
    expected_certified_epsilon,
    planned_threshold,
)
from gradmm_core.errors import InputError
from gradmm_core.mia_audit import attack
from gradmm_core.one_run_epsilon import check_guesses, expected_correct_guesses, one_run_epsilon
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
    check_finite(scores)
    check_guesses(len(scores), guesses)
    order = np.argsort(scores)
    lowest, highest = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    return int(np.sum(~included[lowest]) + np.sum(included[highest]))


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
