"""Intervals, compared with textbook tables, scipy's t-test, a slow bootstrap and their nominal coverage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gradmm.metrics.intervals import interval_over_rows, mean_over_seeds, paired_difference

numbers = st.lists(st.floats(-10, 10), min_size=3, max_size=9)


def test_the_interval_equals_a_textbook_value() -> None:
    # Mean 3, sample standard deviation sqrt(2.5); t of 4 degrees of freedom is 2.776.
    found = mean_over_seeds([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.seeds) == (3.0, 5)
    assert found.half_width == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
    assert found.text(2) == "3.00 ± 1.96"


@given(values=numbers, confidence=st.floats(0.5, 0.999))
def test_the_verdict_equals_that_of_the_t_test(values: list[float], confidence: float) -> None:
    found = mean_over_seeds(values, confidence)
    if np.std(values) < 1e-6:  # the test itself is undefined there
        return
    test: Any = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval(confidence)
    assert found.mean == pytest.approx((low + high) / 2, abs=1e-9)
    assert found.half_width == pytest.approx((high - low) / 2)
    if abs(test.pvalue - (1 - confidence)) > 1e-9:
        significant = "higher" if found.mean > 0 else "lower"
        assert found.verdict == (significant if test.pvalue < 1 - confidence else "within noise")


def test_the_interval_has_its_nominal_coverage() -> None:
    random = np.random.default_rng(0)
    found = [mean_over_seeds(random.normal(0.7, 2.0, 4).tolist()) for _ in range(4000)]
    held = np.mean([each.half_width is not None and abs(each.mean - 0.7) <= each.half_width for each in found])
    assert held == pytest.approx(0.95, abs=0.012)


def test_few_seeds_have_a_mean_and_no_interval() -> None:
    for values in ([0.5], [0.5, 0.7]):
        found = mean_over_seeds(values)
        assert found.half_width is None
        assert found.verdict == "too few seeds"
        assert "±" not in found.text(3)
    assert mean_over_seeds([1234.5]).text(0) == "1,234"


def test_equal_values_have_a_certain_verdict() -> None:
    assert mean_over_seeds([0.25] * 3).verdict == "higher"
    assert mean_over_seeds([-0.25] * 3).verdict == "lower"
    assert mean_over_seeds([0.0] * 3).verdict == "within noise"


@given(values=numbers)
def test_paired_differences_cancel_what_seeds_share(values: list[float]) -> None:
    shifted = [value + 0.5 for value in values]
    found = paired_difference(shifted, values)
    assert found.mean == pytest.approx(0.5)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)
    assert found.verdict == "higher"
    assert paired_difference(values, shifted).verdict == "lower"
    assert paired_difference(values, values).verdict == "within noise"


@pytest.mark.parametrize("values", [[], [math.nan, 1.0, 2.0], [math.inf, 1.0]])
def test_empty_and_non_finite_values_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="no mean"):
        mean_over_seeds(values)
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0], [1.0, 2.0])


def test_the_interval_over_rows_is_that_of_a_slow_bootstrap() -> None:
    values = np.random.default_rng(1).choice([-1.0, 0.0, 0.2, 1.0], 200)
    means = [sample.mean() for sample in values[np.random.default_rng(2).integers(200, size=(10_000, 200))]]
    low, high = interval_over_rows(values)
    assert (low, high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.01)
    assert low < values.mean() < high
    assert interval_over_rows(values) == (low, high)
    narrow = interval_over_rows(values, confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_the_interval_over_rows_has_its_nominal_coverage() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval_over_rows((random.random(300) < 0.7).astype(float))
        held += low <= 0.7 <= high
    assert held / 200 == pytest.approx(0.95, abs=0.045)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_too_few_rows_have_no_interval(values: list[float]) -> None:
    assert np.isnan(interval_over_rows(np.array(values))).all()


def test_rows_that_are_all_alike_have_an_interval_of_no_width() -> None:
    assert interval_over_rows(np.zeros(50)) == (0.0, 0.0)
