"""The mechanism's audit: valid bounds, a published number, and a frame. test_planted_bugs.py plants bugs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from gradmm.audits.canaries import CanaryRelease
from gradmm.audits.checks import Check, check_sensitivity
from gradmm.audits.mechanism_audit import (
    COLUMNS,
    MechanismAudit,
    correct_guesses,
    mechanism_audit,
    one_run_scores,
)
from gradmm.audits.one_run import expected_correct_guesses, one_run_epsilon, one_run_p_value
from gradmm.audits.repeated_draws import (
    certified_epsilon,
    clopper_pearson,
    expected_certified_epsilon,
    largest_certifiable_epsilon,
    planned_threshold,
)
from gradmm.config.settings import MechanismAuditSettings
from gradmm.errors import InputError
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from tests.conftest import examples, make_mechanism

#: Shares of C^2 for a probe and for token sums; of the probe's for class sums, if not the default.
PROBE, ALL_PARTS, GRADIENT, CLASS_SUMS = (0.5, 0.0), (0.3, 0.6), (0.0, 0.0), (0.9, 0.0, 1.0)


def canaries_of(mechanism: GaussianMechanism, count: int, shares: tuple[float, ...] = PROBE) -> CanaryRelease:
    return CanaryRelease(mechanism, ReleaseNorms.of(mechanism.clipping_norm, *shares), count)


def audit_of(mechanism: GaussianMechanism, shares: tuple[float, ...] = PROBE, **changes: object) -> MechanismAudit:
    settings = MechanismAuditSettings.model_validate(changes)
    return mechanism_audit(mechanism, ReleaseNorms.of(mechanism.clipping_norm, *shares), settings)


def gaussian_scores(
    shift: float, draws: int, rng: np.random.Generator, deviation: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(0.0, deviation, draws), rng.normal(shift, deviation, draws)


def leaky_randomised_response(
    epsilon: float, delta: float, with_: bool, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw from the worst (epsilon, delta)-DP mechanism, which reveals the truth with probability delta.

    Every other mechanism is a post-processing of this one (Kairouz, Oh and Viswanath, 2015).
    """
    truth = 1.0 if with_ else -1.0
    told = np.where(rng.random(draws) < 1 / (1 + math.exp(-epsilon)), truth, -truth)
    return np.where(rng.random(draws) < delta, 10 * truth, told)


# Clopper and Pearson


@given(trials=st.integers(1, 400), data=st.data(), confidence=st.floats(0.6, 0.999))
@examples(60)
def test_clopper_pearson_equals_scipys_exact_interval(trials: int, data: st.DataObject, confidence: float) -> None:
    successes = data.draw(st.integers(0, trials))
    counts = np.array([float(successes)])
    lower = binomtest(successes, trials, alternative="greater").proportion_ci(confidence, "exact").low
    upper = binomtest(successes, trials, alternative="less").proportion_ci(confidence, "exact").high
    assert clopper_pearson(counts, trials, confidence, "lower")[0] == pytest.approx(lower, abs=1e-9)
    assert clopper_pearson(counts, trials, confidence, "upper")[0] == pytest.approx(upper, abs=1e-9)


# Repeated draws: valid

REPETITIONS = 400
# 5% plus three standard deviations of a share over the repetitions.
LARGEST_SHARE = 0.05 + 3 * math.sqrt(0.05 * 0.95 / REPETITIONS)


@pytest.mark.parametrize(("epsilon", "delta", "draws"), [(0.5, 0.0, 300), (1.0, 0.1, 300), (2.0, 0.05, 1000)])
def test_the_certified_bound_is_valid_for_the_worst_mechanism(epsilon: float, delta: float, draws: int) -> None:
    rng = np.random.default_rng(0)
    bounds = [
        certified_epsilon(
            leaky_randomised_response(epsilon, delta, False, draws, rng),
            leaky_randomised_response(epsilon, delta, True, draws, rng),
            delta,
        )
        for _ in range(REPETITIONS)
    ]
    assert np.mean(np.array(bounds) > epsilon) <= LARGEST_SHARE
    assert np.mean(bounds) > 0.1 * epsilon  # not trivially valid


def test_the_bound_with_a_planned_threshold_is_valid_for_fair_coins() -> None:
    """The bound on all draws is tight here: at the fixed threshold the log-odds are exactly 1."""
    rng = np.random.default_rng(10)
    bounds = []
    for _ in range(REPETITIONS):
        included = rng.random(2000) < 0.5
        told = [leaky_randomised_response(1.0, 0.01, with_, 2000, rng) for with_ in (False, True)]
        bounds.append(certified_epsilon(told[0][~included], told[1][included], 0.01, threshold=0.0))
    assert np.mean(np.array(bounds) > 1.0) <= LARGEST_SHARE
    assert np.mean(bounds) > 0.8


def test_the_certified_bound_is_valid_if_all_thresholds_are_equally_good() -> None:
    """Above 1 all thresholds of the Laplace mechanism have TPR = e^eps FPR, so the choice must not inflate it."""
    rng = np.random.default_rng(1)
    bounds = [
        certified_epsilon(rng.laplace(0, 1 / 1.5, 200), rng.laplace(1, 1 / 1.5, 200), 0.0)
        for _ in range(REPETITIONS)
    ]
    assert np.mean(np.array(bounds) > 1.5) <= LARGEST_SHARE


def test_scores_without_a_difference_certify_nothing() -> None:
    rng = np.random.default_rng(2)
    bounds = [certified_epsilon(*gaussian_scores(0.0, 400, rng), 0.0) for _ in range(300)]
    assert np.mean(np.array(bounds) > 0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    assert certified_epsilon(np.ones(100), np.ones(100), 0.0) == 0.0


# Repeated draws: powerful


@pytest.mark.parametrize("shift", [1.0, -1.0])
@pytest.mark.parametrize("rare", ["with", "without"])
def test_either_hypothesis_may_be_the_null_and_either_side_may_reject(shift: float, rare: str) -> None:
    """Under one hypothesis only, some scores are extreme; a test for them is the most powerful."""
    rng = np.random.default_rng(3)
    usual, other = rng.normal(size=4000), rng.normal(size=4000)
    other[::20] += 20 * shift
    without, with_ = (usual, other) if rare == "with" else (other, usual)
    # About 100 of 2,000 against none.
    assert 2.5 < certified_epsilon(without, with_, 0.0) < math.log(0.05 / (1 / 2000))


def test_perfectly_separated_draws_certify_the_largest_bound() -> None:
    rng = np.random.default_rng(4)
    for draws in (10, 1001, 50_000):
        without, with_ = gaussian_scores(30.0, draws, rng)
        certified = certified_epsilon(without, with_, 1e-5, threshold=15.0)
        assert certified == pytest.approx(largest_certifiable_epsilon(1e-5, draws))
    # By hand: all n rejections have the canary, at 4/5 x 4/5 of 5%.
    share = 0.032 ** (1 / 100_000)
    assert largest_certifiable_epsilon(0.0, 100_000) == pytest.approx(math.log(share / (1 - share)))
    assert largest_certifiable_epsilon(0.0, 2) == 0.0


@pytest.mark.parametrize(("epsilon", "slack"), [(0.5, 0.05), (1.0, 0.06), (4.0, 0.25)])
def test_the_certified_bound_of_a_gaussian_mechanism_is_as_expected(epsilon: float, slack: float) -> None:
    rng = np.random.default_rng(5)
    sigma = make_mechanism(epsilon).sigma
    threshold = planned_threshold(sigma, 1e-5, 100_000) / sigma
    bounds = [
        certified_epsilon(*gaussian_scores(1 / sigma, 100_000, rng), 1e-5, threshold=threshold) for _ in range(12)
    ]
    expected = expected_certified_epsilon(sigma, 1e-5, 100_000)
    assert 0 < expected < epsilon
    assert np.mean(bounds) == pytest.approx(expected, abs=slack)


def test_the_expected_bound_grows_with_the_draws_to_the_true_epsilon_and_falls_with_noise() -> None:
    sigma = make_mechanism(1.0).sigma
    by_draws = [expected_certified_epsilon(sigma, 1e-5, draws) for draws in (10**4, 10**5, 10**6, 10**9)]
    assert by_draws == sorted(by_draws)
    assert 0.95 < by_draws[-1] < 1.0
    by_noise = [expected_certified_epsilon(sigma * scale, 1e-5, 10**5) for scale in (0.01, 0.1, 0.5, 1.0, 20.0)]
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_noise[0] == pytest.approx(largest_certifiable_epsilon(1e-5, 10**5), abs=0.01)
    assert by_noise[-1] < 0.01


def test_one_canary_is_always_in_or_always_out_and_refused() -> None:
    with pytest.raises(InputError, match="every canary in, or every canary out"):
        audit_of(make_mechanism(), draws=100, canaries=1, guesses=1)


# One run


def test_the_published_one_run_bound() -> None:
    assert one_run_epsilon(500, 100, 100, 1e-5, 0.95) == pytest.approx(3.479, abs=5e-4)


@given(guesses=st.integers(1, 60), data=st.data(), epsilon=st.floats(0, 6), delta=st.floats(0, 1e-2))
@examples(60)
def test_the_one_run_p_value_equals_the_theorem_term_by_term(
    guesses: int, data: st.DataObject, epsilon: float, delta: float
) -> None:
    correct = data.draw(st.integers(0, guesses))
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    probability = [math.comb(guesses, w) * q**w * (1 - q) ** (guesses - w) for w in range(guesses + 1)]
    terms = [sum(probability[correct - i : correct]) / i for i in range(1, correct + 1)]
    theorem = sum(probability[correct:]) + 2 * 80 * delta * max(terms, default=0.0)
    assert one_run_p_value(80, guesses, correct, epsilon, delta) == pytest.approx(min(1.0, theorem), abs=1e-9)


def test_the_one_run_bound_is_0_for_coin_flips_and_grows_with_correct_guesses() -> None:
    assert one_run_epsilon(500, 100, 50, 1e-5) == 0.0
    assert one_run_epsilon(500, 100, 0, 1e-5) == 0.0
    bounds = [one_run_epsilon(500, 100, correct, 1e-5) for correct in range(50, 101)]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) > 38
    for correct, bound in zip(range(50, 101), bounds, strict=True):
        if bound > 0:
            assert one_run_p_value(500, 100, correct, bound, 1e-5) == pytest.approx(0.05)
    assert one_run_epsilon(500, 100, 90, 1e-5) < one_run_epsilon(500, 100, 90, 0.0)
    assert one_run_epsilon(5000, 100, 90, 1e-5) < one_run_epsilon(500, 100, 90, 1e-5)
    assert one_run_epsilon(500, 100, 90, 1e-5, 0.99) < one_run_epsilon(500, 100, 90, 1e-5, 0.95)


def test_the_one_run_bound_is_valid_for_randomised_response() -> None:
    rng = np.random.default_rng(6)
    right = rng.binomial(200, 1 / (1 + math.exp(-1.0)), 20_000)
    bounds = {v: one_run_epsilon(200, 200, v, 0.0) for v in set(right.tolist())}
    exceeding = np.mean([bounds[v] > 1.0 for v in right.tolist()])
    assert 0.03 < exceeding <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)


@pytest.mark.parametrize(("canaries", "guesses", "correct"), [(10, 11, 5), (10, 5, 6), (10, 5, -1), (10, 0, 0)])
def test_impossible_numbers_of_guesses_are_refused(canaries: int, guesses: int, correct: int) -> None:
    with pytest.raises(InputError, match="guesses on"):
        one_run_epsilon(canaries, guesses, correct, 0.0)


@pytest.mark.parametrize(("guesses", "correct"), [(1, 0), (2, 1), (4, 2), (5, 2), (6, 3)])
def test_guesses_are_made_on_the_highest_and_lowest_scores(guesses: int, correct: int) -> None:
    scores = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    included = np.array([False, True, False, True, False, False])
    by_hand = sum(included[np.argsort(-scores)][: guesses - guesses // 2]) + sum(
        not inside for inside in included[np.argsort(scores)][: guesses // 2]
    )
    assert correct_guesses(included, scores, guesses) == by_hand
    assert by_hand >= correct


@pytest.mark.parametrize("shares", [GRADIENT, PROBE, ALL_PARTS, CLASS_SUMS])
@pytest.mark.parametrize(("canaries", "guesses"), [(64, 16), (50, 50)])
def test_the_number_of_correct_guesses_is_as_expected(
    canaries: int, guesses: int, shares: tuple[float, ...]
) -> None:
    rng = np.random.default_rng(7)
    release = canaries_of(make_mechanism(8.0), canaries, shares)
    right = [correct_guesses(*one_run_scores(release, rng), guesses) for _ in range(60)]
    expected = expected_correct_guesses(canaries, guesses, release.mechanism.sigma / release.shift)
    # Four standard errors over 60 runs, and a share of the guesses for the small number of canaries.
    tolerance = 4 * float(np.std(right)) / math.sqrt(60) + 0.015 * guesses
    assert np.mean(right) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("adjacency", ["add-or-remove", "replace"])
def test_without_noise_every_guess_is_correct(adjacency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianMechanism, "noise", lambda _, shape: np.zeros(shape))
    release = canaries_of(make_mechanism(adjacency=adjacency), 64)
    included, scores = one_run_scores(release, np.random.default_rng(8))
    half = release.shift / 2
    np.testing.assert_allclose(scores, np.where(included, half, -half), atol=1e-12)
    assert 20 < included.sum() < 44
    assert correct_guesses(included, scores, 40) == 40
    assert expected_correct_guesses(64, 64, 1e-9) == pytest.approx(64)


# The whole audit


def test_a_correct_mechanism_passes_with_half_its_epsilon_certified() -> None:
    audit = audit_of(make_mechanism(), GRADIENT, confidence=0.95, draws=30_000)
    assert audit.repeated_draws.passes
    assert 0.4 < audit.repeated_draws.certified_epsilon < 1.0  # a normal fit to 200 seeds has one of 150 below 0.4
    assert audit.repeated_draws.expected_certified_epsilon == pytest.approx(0.53, abs=0.03)
    assert audit.repeated_draws.auc == pytest.approx(0.5753, abs=0.01)


@pytest.mark.parametrize(
    ("shares", "adjacency"),
    [
        *((shares, "add-or-remove") for shares in (GRADIENT, PROBE, ALL_PARTS, CLASS_SUMS)),
        (ALL_PARTS, "replace"),
        *(pytest.param(each, "replace", marks=pytest.mark.nightly) for each in (GRADIENT, PROBE, CLASS_SUMS)),
    ],
)
@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_a_correct_mechanism_passes_every_test(shares: tuple[float, ...], adjacency: str, sampler: str) -> None:
    draws = 5_000 if sampler == "discrete" else 1_000
    mechanism = make_mechanism(adjacency=adjacency, sampler=sampler)
    audit = audit_of(mechanism, shares, draws=draws, canaries=60, guesses=20, confidence=0.999999)
    assert audit.failed == []
    assert audit.passes
    parts = [f"gradient {label}" for label in (0, 1)]
    parts += [f"class sum {label}" for label in (0, 1)] if shares[0] else []
    parts += ["second moment"] if shares[0] and shares != CLASS_SUMS else []
    parts += [f"token sum {label}" for label in (0, 1)] if shares[1] else []
    assert [check.part for check in audit.checks if check.test == "noise"] == parts


def test_a_failed_audit_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianMechanism, "noise", lambda _, shape: np.zeros(shape))
    audit = audit_of(make_mechanism(), draws=1000)
    assert not audit.passes
    assert audit.failed[0].startswith("noise of gradient 0 is 0, not in 0.9")
    assert any(each.startswith("repeated draws certify epsilon") for each in audit.failed)
    assert audit.check("noise").measured == 0.0


@pytest.mark.parametrize("failures", [0, 1, 2, 9])
def test_an_audit_that_fails_is_repeated_once_and_the_second_one_counts(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    audits = 0

    def check(release: CanaryRelease, rng: np.random.Generator) -> Check:
        nonlocal audits
        audits += 1
        found = check_sensitivity(release, rng)
        return found.model_copy(update={"measured": 2.0}) if audits <= failures else found

    monkeypatch.setattr("gradmm.audits.mechanism_audit.check_sensitivity", check)
    audit = audit_of(make_mechanism(), draws=1000)
    assert audits == (1 if failures == 0 else 2)
    assert audit.passes == (failures < 2)
    assert caplog.text.count("is repeated with fresh noise: sensitivity is 2, not in 0.999 to") == audits - 1
    if failures < 2:
        audit.require_pass()
    else:
        with pytest.raises(RuntimeError, match=r"failed twice: sensitivity is 2, .* once in 206,612 times"):
            audit.require_pass()


def test_the_second_audit_has_noise_and_coins_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = []

    def fail(included: np.ndarray, of_canaries: np.ndarray, guesses: int) -> int:
        scores.append((included, of_canaries))
        return guesses  # all correct

    monkeypatch.setattr("gradmm.audits.mechanism_audit.correct_guesses", fail)
    assert not audit_of(make_mechanism(), draws=1000).one_run.passes
    (first, first_scores), (second, second_scores) = scores
    assert (first != second).any()
    assert (first_scores != second_scores).all()


def test_the_frame_has_a_row_for_each_check_and_attack() -> None:
    audit = audit_of(make_mechanism(2.0), draws=2000, canaries=80, guesses=20, confidence=0.9)
    frame = audit.as_frame()
    assert list(frame.columns) == COLUMNS
    assert frame["test"].tolist() == [
        "sensitivity",
        *["noise"] * 5,
        "correlation",
        "repeated draws",
        "one run",
    ]
    assert frame[["claimed_epsilon", "delta"]].to_numpy().tolist() == [[2.0, 1e-5]] * 9
    assert frame["confidence"].tolist() == [0.9999] * 7 + [0.9] * 2
    assert frame["passes"].tolist() == [
        *(check.passes for check in audit.checks),
        audit.repeated_draws.passes,
        audit.one_run.passes,
    ]
    assert frame["measured"].notna().tolist() == [True] * 7 + [False] * 2
    attacks = frame.iloc[-2:]
    assert attacks["canaries"].tolist() == [64, 80]
    assert attacks["draws"].tolist() == [2000, 1]
    assert attacks["guesses"].isna().tolist() == attacks["correct"].isna().tolist() == [True, False]
    assert (attacks["guesses"].iloc[1], attacks["correct"].iloc[1]) == (20, audit.one_run.correct)
    assert audit.one_run.correct is not None
    certified = one_run_epsilon(80, 20, audit.one_run.correct, 1e-5, 0.9)
    assert attacks["certified_epsilon"].tolist() == [audit.repeated_draws.certified_epsilon, certified]


def test_unusable_scores_and_draws_are_refused() -> None:
    with pytest.raises(InputError, match="not finite"):
        certified_epsilon(np.array([0.0, math.nan]), np.ones(2), 0.0)
    with pytest.raises(InputError, match="not finite"):
        correct_guesses(np.array([True, False]), np.array([0.0, math.inf]), 1)
    with pytest.raises(InputError, match="1 draws are too few"):
        certified_epsilon(np.zeros(1), np.ones(1), 0.0)
