"""Audit the mechanism: put canary gradients through clipping and noise, and certify lower bounds on epsilon.

The audit attacks only the mechanism, with gradients that it makes itself, so it needs no private data. It finds
*lower* bounds on epsilon. A bound above the claim shows a bug. A bound below the claim proves nothing, except that
there is no bug large enough for the audit to detect (see the expected and the largest certifiable bounds).

Repeated draws: many releases, each with a canary or without it by a fair coin (`certified_epsilon`).
One run: many canaries, each in or out by a fair coin, guessed from one release (`one_run_epsilon`). It needs a
single release, and certifies less.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from gradmm.audit.one_run import check_guesses, expected_correct_guesses, one_run_epsilon
from gradmm.audit.repeated_draws import (
    certified_epsilon,
    check_finite,
    expected_certified_epsilon,
    planned_threshold,
)
from gradmm.config.settings import Settings
from gradmm.errors import InputError
from gradmm.metrics.roc import RocFigures, roc_figures
from gradmm.privacy.mechanism import GaussianMechanism

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

#: A canary's norm before clipping, in clipping norms. If clipping is skipped, its signal grows by this factor.
CANARY_NORM = 10.0

#: Noise values in memory at a time (8 MB).
CHUNK_NUMBERS = 2**20


@runtime_checkable
class MechanismUnderTest(Protocol):
    """The two steps of a release, as flat vectors of `dims` numbers. The base data are arbitrary, or empty."""

    @property
    def dims(self) -> int: ...

    def sum_of(self, records: Float[np.ndarray, "records dims"]) -> Float[np.ndarray, " dims"]:
        """Sum the clipped gradients of the base data and of these records, if any, without noise."""
        ...

    def noise(self, count: int) -> Float[np.ndarray, "count dims"]:
        """Draw the noise of `count` releases, as a release draws it."""
        ...


class MechanismTest(Settings):
    """The epsilon that one test certified at its `confidence`, and the bound expected for a correct mechanism.

    The `RocFigures` compare the scores of releases with and without the canary (in one run: of canaries in and
    out). They are point estimates without a confidence level.
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
        """Whether the certified epsilon is at most the claimed one."""
        return self.certified_epsilon <= self.claimed_epsilon


class MechanismAudit(Settings):
    """The results of both tests of a mechanism."""

    repeated_draws: MechanismTest
    one_run: MechanismTest

    @property
    def passes(self) -> bool:
        """Whether both tests pass. A correct mechanism fails with probability at most 2 (1 - confidence).

        In practice repeated draws almost never fail. One run fails with nearly its full error probability if
        epsilon is so small that guesses are close to coin flips: 5% of correct mechanisms with epsilon 0.05 fail
        at 95% confidence.
        """
        return self.repeated_draws.passes and self.one_run.passes

    def as_frame(self) -> pd.DataFrame:
        """Return one row per test, with the columns `COLUMNS`; `guesses` and `correct` are missing integers for
        repeated draws."""
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
    """Put canaries through the mechanism, and compare the epsilon that their scores certify with the claim.

    Canaries have random directions and a norm of `CANARY_NORM` times the claimed clipping norm. If the claimed
    adjacency is "replace", an absent canary is replaced by its negative.

    Args:
        claim: epsilon, delta, clipping norm and adjacency are tested. Sigma is used only to plan the threshold and
            to compute the expected bounds.
        draws: releases with the canary, on average, and as many without it.
        canaries, guesses: of the one run. Canaries are orthogonal unless there are more than dimensions; then they
            interfere with one another, and the one run hardly detects bugs in the clipping.
        seed: of the directions and the coins, which the mechanism must not know. Its noise is its own.

    Raises:
        InputError: for fewer than two draws, more guesses than canaries, coins that put every canary in or every
            canary out, or scores that are not finite.
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
        **_roc_figures(without, with_),
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
        **_roc_figures(scores[~included], scores[included]),
    )
    return MechanismAudit(repeated_draws=repeated_draws, one_run=one_run)


def repeated_scores(
    mechanism: MechanismUnderTest, claim: GaussianMechanism, draws: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, " without"], Float[np.ndarray, " with"]]:
    """Score releases without and with one canary: 2 x `draws` releases, each with it by a fair coin.

    A score is a release's projection on the canary's direction, less that of the noiseless sum without the canary.
    Releases are projected in chunks, which bounds the memory. An attacker can subtract noise that repeats, as
    seeded noise does, so repeated noise is removed from the scores. (Among 100,000 correct draws, two coincide
    with a probability of about 1e-6.)
    """
    direction = _directions(1, mechanism.dims, rng)
    canary = CANARY_NORM * claim.clipping_norm * direction
    absent = mechanism.sum_of(_when_absent(canary, claim))
    shift = float((mechanism.sum_of(canary) - absent) @ direction[0])
    # At least two calls, so that seeded noise repeats.
    noise = np.concatenate([_projected_noise(mechanism, direction[0], draws) for _ in range(2)])
    included = rng.random(2 * draws) < 0.5
    _, which, counts = np.unique(noise, return_inverse=True, return_counts=True)
    noise[counts[which] > 1] = 0.0
    return noise[~included], noise[included] + shift


def one_run_scores(
    mechanism: MechanismUnderTest, claim: GaussianMechanism, canaries: int, rng: np.random.Generator
) -> tuple[Bool[np.ndarray, " canaries"], Float[np.ndarray, " canaries"]]:
    """Put canaries into one release by fair coins; return which ones are in, and the score of each.

    A score is the projection, on the canary's direction, of the release minus the noiseless sum's expectation over
    the coins. The expectation is the midpoint between all canaries in and all out.
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
    """Count correct guesses: half guess that the highest scores are in, half that the lowest are out.

    Raises:
        InputError: for more guesses than canaries, or scores that are not finite.
    """
    check_finite(scores)
    check_guesses(len(scores), guesses)
    order = np.argsort(scores)
    lowest, highest = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    return int(np.sum(~included[lowest]) + np.sum(included[highest]))


def _roc_figures(without: Float[np.ndarray, " without"], with_: Float[np.ndarray, " with"]) -> RocFigures:
    if not (len(without) and len(with_)):
        fix = "use more canaries or draws"
        raise InputError("the coins put every canary in, or every canary out", "mechanism_audit", fix)
    return roc_figures(with_, without)


def _directions(count: int, dims: int, rng: np.random.Generator) -> Float[np.ndarray, "count dims"]:
    """Draw unit vectors in random directions, orthogonal unless there are more than dimensions."""
    normal = rng.normal(size=(count, dims))
    if count > dims:
        return normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return np.linalg.qr(normal.T).Q.T


def _when_absent(
    canaries: Float[np.ndarray, "canaries dims"], claim: GaussianMechanism
) -> Float[np.ndarray, "records dims"]:
    """Return the records that stand in for absent canaries: none, or their negatives if records are replaced."""
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
