"""Compare the membership-inference attack with brute force, and its power with simulation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from gradmm.audits.mia_audit import (
    COLUMNS,
    ROC_RATES,
    attack,
    audit_power,
    best_threshold,
    detectable_advantage,
    largest_advantage,
    mia_audit,
    summarise,
)
from gradmm.config.settings import MiaAuditSettings
from gradmm.errors import InputError
from gradmm.metrics.roc import tpr_within
from tests.conftest import examples

#: Whole numbers, so that there are ties, which monotone transforms preserve.
losses = st.lists(st.integers(0, 12), min_size=1, max_size=25).map(lambda values: np.array(values, dtype=float))


def advantage(members: np.ndarray, non_members: np.ndarray, threshold: float) -> float:
    true_positives = sum(loss <= threshold for loss in members.tolist()) / len(members)
    return true_positives - sum(loss <= threshold for loss in non_members.tolist()) / len(non_members)


def tpr_at(members: np.ndarray, non_members: np.ndarray, largest_fpr: float) -> float:
    """Search all thresholds, including one below all losses."""
    best = 0.0
    for threshold in [*members, *non_members]:
        if sum(non_members <= threshold) <= largest_fpr * len(non_members):
            best = max(best, sum(members <= threshold) / len(members))
    return best


@given(members=losses, non_members=losses)
def test_the_threshold_is_the_best_of_all_losses(members: np.ndarray, non_members: np.ndarray) -> None:
    threshold = best_threshold(members, non_members)
    everywhere = [advantage(members, non_members, t) for t in [*members, *non_members]]
    assert threshold in [*members, *non_members]
    assert advantage(members, non_members, threshold) == pytest.approx(max(everywhere))


@given(members=losses, non_members=losses, threshold=st.integers(-1, 13))
def test_the_attacks_figures_equal_brute_force(
    members: np.ndarray, non_members: np.ndarray, threshold: int
) -> None:
    figures = attack(members, non_members, float(threshold))
    pairs = [(m < n) + (m == n) / 2 for m in members for n in non_members]
    assert figures["advantage"] == pytest.approx(advantage(members, non_members, threshold))
    assert figures["auc"] == pytest.approx(np.mean(pairs))
    assert figures["tpr_at_1_fpr"] == pytest.approx(tpr_at(members, non_members, 0.01))
    assert figures["tpr_at_01_fpr"] == pytest.approx(tpr_at(members, non_members, 0.001))
    roc = tpr_within(ROC_RATES, -members, -non_members)
    assert roc == pytest.approx([tpr_at(members, non_members, k / 100) for k in range(101)])


@pytest.mark.parametrize(("non_members", "at_1", "at_01"), [(99, 0.2, 0.2), (100, 0.4, 0.2), (1000, 1.0, 0.4)])
def test_low_false_positive_rates_allow_as_many_false_positives_as_fit(
    non_members: int, at_1: float, at_01: float
) -> None:
    """Between any two members lies one non-member, until they run out."""
    members = np.array([0.0, 2.0, 4.0, 6.0, 8.0])
    others = np.concatenate([[1.0, 3.0, 5.0, 7.0], np.full(non_members - 4, 100.0)])
    figures = attack(members, others, 0.0)
    assert (figures["tpr_at_1_fpr"], figures["tpr_at_01_fpr"]) == (at_1, at_01)


@given(
    members=losses.filter(lambda x: len(x) >= 4),
    non_members=losses.filter(lambda x: len(x) >= 4),
    transform=st.sampled_from([lambda x: 3 * x - 7, np.exp, np.sqrt, lambda x: x**3]),
    seed=st.integers(0, 2**32),
)
@examples(50)
def test_a_monotone_transform_of_the_losses_changes_nothing_but_the_threshold(
    members: np.ndarray, non_members: np.ndarray, transform, seed: int
) -> None:
    setting = MiaAuditSettings(runs=2, threshold_records=6, test_records=5)
    plain = mia_audit(members, non_members, setting, seed, 1.0)
    transformed = mia_audit(transform(members), transform(non_members), setting, seed, 1.0)
    assert plain.drop(columns="threshold").equals(transformed.drop(columns="threshold"))
    np.testing.assert_allclose(transform(plain["threshold"].to_numpy()), transformed["threshold"], rtol=1e-12)


def test_a_perfect_attack_has_advantage_1_and_auc_1() -> None:
    frame = mia_audit(np.zeros(250), np.ones(250), MiaAuditSettings(), 0, None)
    assert list(frame.columns) == COLUMNS
    assert len(frame) == 10
    for name in ("advantage", "auc", "tpr_at_1_fpr", "tpr_at_01_fpr"):
        assert frame[name].eq(1.0).all()


def test_exchangeable_losses_have_no_advantage_on_average() -> None:
    rng = np.random.default_rng(0)
    setting = MiaAuditSettings(runs=1)
    figures = [
        summarise(mia_audit(rng.normal(size=200), rng.normal(size=200), setting, seed, None))
        for seed in range(300)
    ]
    # One advantage has a standard deviation of at most 0.0707, an AUC one of 0.041.
    advantages, aucs = (np.array([f[name] for f in figures], dtype=float) for name in ("advantage", "auc"))
    assert abs(advantages.mean()) < 4 * 0.0707 / math.sqrt(300)
    assert abs(aucs.mean() - 0.5) < 4 * 0.041 / math.sqrt(300)


def test_the_threshold_never_sees_the_records_that_it_is_tested_on() -> None:
    """All losses differ, so a loss identifies its record."""
    setting = MiaAuditSettings(runs=20, threshold_records=3, test_records=5)
    members, non_members = np.arange(8.0), np.arange(8.0) + 0.5
    seen: list[tuple[str, set[float], set[float]]] = []

    def spy(name: str, original):
        def record(*arguments):
            seen.append((name, set(arguments[0]), set(arguments[1])))
            return original(*arguments)

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradmm.audits.mia_audit.best_threshold", spy("threshold", best_threshold))
        patch.setattr("gradmm.audits.mia_audit.attack", spy("test", attack))
        mia_audit(members, non_members, setting, 0, None)
    assert len(seen) == 40
    for (_, members_of_threshold, others_of_threshold), (_, members_of_test, others_of_test) in zip(
        seen[::2], seen[1::2], strict=True
    ):
        assert members_of_threshold | members_of_test == set(members)
        assert others_of_threshold | others_of_test == set(non_members)
        assert (len(members_of_threshold), len(others_of_threshold)) == (3, 3)
        assert (len(members_of_test), len(others_of_test)) == (5, 5)
    assert len({frozenset(part[1]) for part in seen[::2]}) > 5


@pytest.mark.parametrize(
    ("members", "non_members", "test_records"), [(4, 4, 2), (9, 300, 4), (300, 151, 75), (200, 200, 100)]
)
def test_too_few_records_are_split_in_halves(members: int, non_members: int, test_records: int) -> None:
    rng = np.random.default_rng(1)
    frame = mia_audit(rng.normal(size=members), rng.normal(size=non_members), MiaAuditSettings(), 0, 0.5)
    assert frame["test_records"].eq(test_records).all()


@pytest.mark.parametrize(("members", "non_members"), [(3, 100), (100, 3), (0, 0)])
def test_fewer_than_four_members_or_non_members_are_refused(members: int, non_members: int) -> None:
    with pytest.raises(InputError, match="too few"):
        mia_audit(np.zeros(members), np.zeros(non_members), MiaAuditSettings(), 0, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match="not finite"):
        mia_audit(np.array([1.0, 2.0, 3.0, bad]), np.ones(4), MiaAuditSettings(), 0, None)


def test_the_seed_determines_the_splits() -> None:
    rng = np.random.default_rng(2)
    members, others = rng.normal(size=250), rng.normal(size=250)
    first, again, other = (mia_audit(members, others, MiaAuditSettings(), seed, 1.0) for seed in (7, 7, 8))
    assert first.equals(again)
    assert not first.equals(other)


@given(epsilon=st.floats(0.01, 8), delta=st.floats(0, 0.5))
def test_the_largest_advantage_is_the_maximum_over_the_region_of_dp(epsilon: float, delta: float) -> None:
    """Maximise TPR - FPR under the four inequalities of Kairouz et al., by linear programming."""
    growth = math.exp(epsilon)
    region = [[-growth, 1], [-1, growth]]  # TPR - e^eps FPR <= delta; e^eps TPR - FPR <= e^eps - 1 + delta
    solution = linprog([1, -1], A_ub=region, b_ub=[delta, growth - 1 + delta], bounds=[(0, 1), (0, 1)])
    assert largest_advantage(epsilon, delta) == pytest.approx(-solution.fun, abs=1e-7)


def test_the_largest_advantage_of_the_papers_claim_is_two_and_a_half_percent() -> None:
    assert largest_advantage(0.05, 0.0) == pytest.approx(0.025, abs=2e-4)
    assert largest_advantage(0.05, 1e-4) > largest_advantage(0.05, 0.0)
    assert largest_advantage(1000.0, 1e-5) == 1.0


@pytest.mark.parametrize(("true_advantage", "records"), [(0.025, 100), (0.2, 100), (0.2, 40), (0.6, 10), (1.0, 5)])
def test_power_equals_the_share_of_simulated_attacks_that_reject(true_advantage: float, records: int) -> None:
    rng = np.random.default_rng(3)
    simulations = 200_000
    coins = rng.binomial(2 * records, 0.5, simulations)
    # The smallest number of correct guesses that at most 5% of simulated coin flips reach.
    critical = next(g for g in range(2 * records + 2) if np.mean(coins >= g) <= 0.05)
    right_members = rng.binomial(records, (1 + true_advantage) / 2, simulations)
    right_non_members = rng.binomial(records, (1 + true_advantage) / 2, simulations)
    rejected = np.mean(right_members + right_non_members >= critical)
    assert audit_power(true_advantage, records) == pytest.approx(rejected, abs=0.005)


@pytest.mark.parametrize("false_positive_rate", [0.01, 0.1, 0.5, 0.9])
def test_the_test_errs_at_most_5_percent_for_any_threshold_without_advantage(
    false_positive_rate: float,
) -> None:
    rng = np.random.default_rng(4)
    records, simulations = 100, 200_000
    hits = rng.binomial(records, false_positive_rate, simulations)
    false_alarms = rng.binomial(records, false_positive_rate, simulations)
    # An advantage is significant if coin flips reach its number of correct guesses with at most 5%.
    guesses = hits + records - false_alarms
    coins = rng.binomial(2 * records, 0.5, simulations)
    critical = next(g for g in range(2 * records + 1) if np.mean(coins >= g) <= 0.05)
    assert np.mean(guesses >= critical) <= 0.05 + 0.002


@given(records=st.integers(3, 20_000))
def test_the_detectable_advantage_is_seen_with_80_percent_power(records: int) -> None:
    smallest = detectable_advantage(records)
    assert audit_power(smallest, records) == pytest.approx(0.8, abs=1e-6)


@given(records=st.integers(100, 20_000))
def test_the_detectable_advantage_is_near_the_normal_approximation(records: int) -> None:
    approximation = (1.6449 + 0.8416) / math.sqrt(2 * records)
    assert approximation * 0.97 < detectable_advantage(records) < approximation * 1.08


def test_two_records_detect_no_advantage() -> None:
    assert math.isnan(detectable_advantage(2))
    assert audit_power(1.0, 2) == 0.0


def test_the_summary_is_mean_and_sample_deviation_over_the_runs() -> None:
    rng = np.random.default_rng(5)
    frame = mia_audit(rng.normal(size=300), rng.normal(1, size=300), MiaAuditSettings(runs=4), 0, 0.05, 1e-4)
    figures = summarise(frame)
    for name in ("advantage", "auc", "tpr_at_1_fpr", "tpr_at_01_fpr"):
        values = frame[name].to_numpy()
        assert figures[name] == pytest.approx(values.mean())
        assert figures[f"{name}_std"] == pytest.approx(np.std(values, ddof=1))
    assert figures["power"] == audit_power(largest_advantage(0.05, 1e-4), 100)
    assert figures["detectable_advantage"] == detectable_advantage(100)
    assert figures["test_records"] == 100


def test_the_summary_is_json_for_one_run_without_claim_or_power() -> None:
    frame = mia_audit(np.arange(4.0), np.arange(4.0), MiaAuditSettings(runs=1), 0, None)
    figures = json.loads(json.dumps(summarise(frame), allow_nan=False))
    assert figures["power"] is None
    assert figures["detectable_advantage"] is None
    assert figures["advantage_std"] == 0.0
