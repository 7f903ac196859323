"""The guarantee in numbers and words: what an observer of all releases can do at most."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from gradmm.config.settings import PrivacySettings
from gradmm.privacy.guarantee import Guarantee, guarantee, largest_tpr, rounded_up
from gradmm.privacy.mechanism import gaussian_delta, gaussian_mechanism

ROOT = Path(__file__).parents[3]
FALSE_ALARMS = np.linspace(0.001, 0.999, 99)


def of(**changes: object) -> Guarantee:
    settings = PrivacySettings.model_validate({"epsilon": 1.0, "delta": 1e-5} | changes)
    return guarantee(settings, gaussian_mechanism(settings))


@given(epsilon=st.floats(0.05, 8.0))
def test_no_test_of_the_release_detects_more_than_is_said(epsilon: float) -> None:
    """Between N(0, 1) and N(mu, 1) a threshold is the best test (Neyman and Pearson)."""
    found = of(epsilon=epsilon)
    assert found.mu is not None
    detected = found.largest_detection(FALSE_ALARMS)
    np.testing.assert_allclose(detected, norm.sf(norm.isf(FALSE_ALARMS) - found.mu), rtol=1e-9)
    # The same curve as the envelope of epsilon and delta over all epsilons.
    envelope = np.min(
        [largest_tpr(FALSE_ALARMS, e, gaussian_delta(1 / found.mu, e)) for e in np.linspace(0, 12, 400)], axis=0
    )
    assert (detected <= envelope + 1e-9).all()
    np.testing.assert_allclose(detected, envelope, atol=0.01)


def test_discrete_noise_detects_what_epsilon_and_delta_allow() -> None:
    found = of(sampler="discrete")
    expected = np.minimum(np.e * FALSE_ALARMS + 1e-5, 1 - (1 - 1e-5 - FALSE_ALARMS) / np.e)
    np.testing.assert_allclose(found.largest_detection(FALSE_ALARMS), expected, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 1000.0])
def test_discrete_noise_lets_guess_what_epsilon_and_delta_allow(epsilon: float) -> None:
    found = of(sampler="discrete").model_copy(update={"composed_epsilon": epsilon})
    assert found.correct_guesses == pytest.approx((1 + 1e-5 * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))


def test_the_words_name_the_unit_and_both_shares() -> None:
    words = of().in_words
    assert "everything in the data but one record, guesses whether that record was in the data" in words
    assert "correctly in at most 55.4% of cases" in words
    assert "At a false-alarm rate of 1% the attack detects at most 2.0% of those that were" in words
    assert (
        "but all records with the same 'person', guesses whether those were" in of(unit_column="person").in_words
    )


def test_the_guide_has_both_shares_for_each_epsilon() -> None:
    section = (ROOT / "docs/guide/recipes.md").read_text().partition("## Epsilon\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", section, re.MULTILINE))
    columns = zip(*(cells.split(" | ") for cells in rows.values()), strict=True)
    assert list(rows) == ["epsilon", "right guesses", "detected"]
    for epsilon, guesses, detected in columns:
        words = of(epsilon=float(epsilon), delta=None, declared_records=10_000).in_words
        assert f"at most {guesses} of cases" in words
        assert f"at most {detected} of those" in words


@pytest.mark.parametrize("changes", [{"epsilon": None}, {"unsafe_noise_seed": 3}])
def test_without_a_guarantee_there_are_no_words(changes: dict[str, object]) -> None:
    found = of(**changes)
    assert found.in_words == ""
    assert found.epsilon_at(1e-6) is None


def test_releases_of_several_kinds_have_no_trade_off() -> None:
    together = of().model_copy(update={"mu": None, "releases": 2})
    assert together.in_words == ""
    with pytest.raises(ValueError, match="no guarantee together"):
        together.largest_detection(FALSE_ALARMS)


@given(value=st.floats(1e-12, 1e6), digits=st.integers(2, 6))
def test_a_bound_is_never_written_below_its_value(value: float, digits: int) -> None:
    written = float(rounded_up(value, digits))
    assert value * (1 - 1.1e-6) <= written <= value * (1 + 10.0 ** (1 - digits))


def test_a_composed_epsilon_of_one_release_is_its_own() -> None:
    assert [rounded_up(value, 3) for value in (1.0000000001, 8.5336e-05, 1.8431, math.inf)] == [
        "1",
        "8.54e-05",
        "1.85",
        "inf",
    ]
