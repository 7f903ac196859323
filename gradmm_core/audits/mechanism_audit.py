"""Audit the mechanism: put canaries through the code of a release, and compare the result with the claim.

The canaries are vectors that the audit makes itself, so it needs no private data (see `canaries`). Two attacks
find *lower* bounds on epsilon. A bound above the claim shows a bug; one below it proves nothing. The `checks` find
bugs that no attack can find at a small epsilon.

Repeated draws: many releases, each canary in or out by a fair coin (`certified_epsilon`).
One run: many canaries, each in or out by a fair coin, guessed from one release (`one_run_epsilon`). It needs a
single release, and certifies less.

Noise is random, so a correct mechanism fails now and then. An audit that fails is therefore repeated once, and
only the second one counts.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from tqdm import trange

from gradmm.audits.canaries import CanaryRelease
from gradmm.audits.checks import Check, NoiseSample, check_sensitivity, required_sigma
from gradmm.audits.one_run import check_guesses, expected_correct_guesses, one_run_epsilon
from gradmm.audits.repeated_draws import (
    certified_epsilon,
    check_finite,
    expected_certified_epsilon,
    planned_threshold,
)
from gradmm.config.settings import MechanismAuditSettings, Settings
from gradmm.errors import InputError
from gradmm.metrics.roc import RocFigures, roc_figures
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.threads import limit_threads

logger = logging.getLogger(__name__)

COLUMNS = [
    "test",
    "part",
    "passes",
    "measured",
    "low",
    "high",
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

#: Canaries of each of the repeated releases.
PER_RELEASE = 64

#: Confidence of the checks. They see far more draws than the attacks, and every private run is checked.
CHECK_CONFIDENCE = 0.9999


class MechanismTest(Settings):
    """The epsilon that one test certified at its `confidence`, and the bound expected for a correct mechanism.

    Each of its `releases` has `canaries` canaries. The `RocFigures` compare the scores of releases with and
    without the canary (in one run: of canaries in and out). They are point estimates without a confidence level.
    """

    test: Literal["repeated draws", "one run"]
    releases: int
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
    """The results of all checks and of both attacks."""

    checks: tuple[Check, ...]
    repeated_draws: MechanismTest
    one_run: MechanismTest

    @property
    def passes(self) -> bool:
        """Whether everything passes.

        In practice repeated draws of a correct mechanism almost never fail. One run fails with nearly its full
        error probability if epsilon is so small that guesses are close to coin flips.
        """
        return not self.failed

    @property
    def false_alarms(self) -> float:
        """Bound on the probability that a correct mechanism fails two audits in a row.

        Each one fails by its two checks of the noise, or by its two attacks.
        """
        return (2 * (1 - CHECK_CONFIDENCE) + 2 * (1 - self.one_run.confidence)) ** 2

    @property
    def failed(self) -> list[str]:
        """A description of each check and attack that failed."""
        checks = [
            f"{check.test}{f' of {check.part}' if check.part else ''} is {check.measured:.6g}, "
            f"not in {check.low:.6g} to {check.high:.6g}"
            for check in self.checks
            if not check.passes
        ]
        attacks = [
            f"{attack.test} certify epsilon {attack.certified_epsilon:.3g}, above {attack.claimed_epsilon:g}"
            for attack in (self.repeated_draws, self.one_run)
            if not attack.passes
        ]
        return checks + attacks

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the stage `mechanism_audit`."""
        noise = self.check("noise")
        return {
            "claimed_epsilon": self.repeated_draws.claimed_epsilon,
            "confidence": self.one_run.confidence,
            "sensitivity": self.check("sensitivity").measured,
            "noise": noise.measured,
            "noise_low": noise.low,
            "noise_high": noise.high,
            "draws": self.repeated_draws.draws,
            "certified_epsilon": self.repeated_draws.certified_epsilon,
            "expected_certified_epsilon": self.repeated_draws.expected_certified_epsilon,
            "one_run_certified_epsilon": self.one_run.certified_epsilon,
            "one_run_expected_certified_epsilon": self.one_run.expected_certified_epsilon,
            "auc": self.repeated_draws.auc,
            "tpr_at_1_fpr": self.repeated_draws.tpr_at_1_fpr,
            "tpr_at_01_fpr": self.repeated_draws.tpr_at_01_fpr,
        }

    def require_pass(self) -> None:
        """Raise a RuntimeError if a check failed, or if a certified epsilon exceeds the claim."""
        if not self.passes:
            raise RuntimeError(
                f"the mechanism's audit failed twice: {'; '.join(self.failed)}. Nothing private was read. This "
                f"happens to a correct mechanism once in {1 / self.false_alarms:,.0f} times at most: "
                "please report it"
            )

    def check(self, test: Literal["sensitivity", "noise", "correlation"]) -> Check:
        """Return the result of a check; of the noise's, that of the part nearest to a limit, or beyond."""
        return max((check for check in self.checks if check.test == test), key=lambda check: check.extremity)

    def as_frame(self) -> pd.DataFrame:
        """Return one row per check and attack, with the columns `COLUMNS`; what a row does not have is missing."""
        shared = self.repeated_draws.model_dump(include={"claimed_epsilon", "delta"})
        shared["confidence"] = CHECK_CONFIDENCE
        rows = [shared | each.model_dump() | {"passes": each.passes} for each in self.checks]
        rows += [each.model_dump() | {"passes": each.passes} for each in (self.repeated_draws, self.one_run)]
        counts = dict.fromkeys(("canaries", "draws", "guesses", "correct"), "Int64")
        return pd.DataFrame(rows, columns=COLUMNS).astype(counts)


@limit_threads(1)  # the matrices are small, and on a busy machine threads wait for one another
def mechanism_audit(
    mechanism: GaussianMechanism, norms: ReleaseNorms, settings: MechanismAuditSettings, seed: int = 0
) -> MechanismAudit:
    """Release canaries many times by the mechanism, and compare what comes out with its claim.

    If that fails, all of it is repeated with fresh noise and other coins, and the second result counts.
    If the claimed adjacency is "replace", an absent canary is replaced by its negative.

    Args:
        mechanism: its epsilon, delta, clipping norm and adjacency are the claim.
        norms: of the parts of a record's vector.
        seed: of the coins, which the mechanism must not know. Its noise is its own.

    Raises:
        InputError: for more guesses than canaries, coins that put every canary in or every canary out, or scores
            that are not finite.
    """
    rng = np.random.default_rng(seed)
    found = _audited(mechanism, norms, settings, rng)
    if found.passes:
        return found
    logger.warning("the mechanism's audit failed, and is repeated with fresh noise: %s", "; ".join(found.failed))
    return _audited(mechanism, norms, settings, rng)


def _audited(
    mechanism: GaussianMechanism, norms: ReleaseNorms, settings: MechanismAuditSettings, rng: np.random.Generator
) -> MechanismAudit:
    draws, sigma = settings.draws_of(mechanism.sampler), required_sigma(mechanism)
    outcome = partial(
        MechanismTest,
        claimed_epsilon=mechanism.epsilon,
        delta=mechanism.delta,
        confidence=settings.confidence,
    )

    release = CanaryRelease(mechanism, norms, PER_RELEASE)
    noise = NoiseSample(sigma)
    releases = max(2, math.ceil(2 * draws / release.canaries))  # the check of correlation compares two
    without, with_ = repeated_scores(release, releases, rng, noise)
    multiplier = sigma / release.shift
    threshold = release.shift * planned_threshold(multiplier, mechanism.delta, draws)
    repeated_draws = outcome(
        test="repeated draws",
        releases=releases,
        canaries=release.canaries,
        draws=draws,
        certified_epsilon=certified_epsilon(without, with_, mechanism.delta, settings.confidence, threshold),
        expected_certified_epsilon=expected_certified_epsilon(
            multiplier, mechanism.delta, draws, settings.confidence
        ),
        **_roc_figures(without, with_),
    )

    once = CanaryRelease(mechanism, norms, settings.canaries)
    included, scores = one_run_scores(once, rng)
    correct = correct_guesses(included, scores, settings.guesses)
    expected = math.floor(expected_correct_guesses(once.canaries, settings.guesses, multiplier))
    certified, expected_bound = (
        one_run_epsilon(once.canaries, settings.guesses, right, mechanism.delta, settings.confidence)
        for right in (correct, expected)
    )
    one_run = outcome(
        test="one run",
        releases=1,
        canaries=once.canaries,
        draws=1,
        guesses=settings.guesses,
        correct=correct,
        certified_epsilon=certified,
        expected_certified_epsilon=expected_bound,
        **_roc_figures(scores[~included], scores[included]),
    )
    checks = (check_sensitivity(release, rng), *noise.checks(CHECK_CONFIDENCE))
    return MechanismAudit(checks=checks, repeated_draws=repeated_draws, one_run=one_run)


def repeated_scores(
    release: CanaryRelease, releases: int, rng: np.random.Generator, noise: NoiseSample
) -> tuple[Float[np.ndarray, " without"], Float[np.ndarray, " with"]]:
    """Release canaries `releases` times, in or out by fair coins each time. Collect the noise.

    A score is the release's projection on the direction in which its canary moves it, less that of the noiseless
    sums without the canary. Canaries do not affect one another's scores.
    """
    absent = release.scores(release.clean(release.sums(np.zeros(release.canaries, dtype=bool))))
    without, with_ = [], []
    for _ in trange(releases, desc="mechanism audit", disable=None, leave=False):
        included = rng.random(release.canaries) < 0.5
        sums = release.sums(included)
        clean, released = release.clean(sums), release.released(sums)
        noise.add({part: released[part] - clean[part] for part in clean})
        scores = release.scores(released) - absent
        without.append(scores[~included])
        with_.append(scores[included])
    return np.concatenate(without), np.concatenate(with_)


def one_run_scores(
    release: CanaryRelease, rng: np.random.Generator
) -> tuple[Bool[np.ndarray, " canaries"], Float[np.ndarray, " canaries"]]:
    """Put canaries into one release by fair coins; return which ones are in, and the score of each.

    A score is the projection, on the canary's direction, of the release minus the noiseless sums' expectation over
    the coins. The expectation is the midpoint between all canaries in and all out.
    """
    included = rng.random(release.canaries) < 0.5
    scores = release.scores(release.released(release.sums(included)))
    ends = [release.clean(release.sums(np.full(release.canaries, every))) for every in (True, False)]
    return included, scores - (release.scores(ends[0]) + release.scores(ends[1])) / 2


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
