from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import kstest, norm

from gradmm_core.errors import InputError
from gradmm_core.privacy import (
    GaussianMechanism,
    gaussian_delta,
    gaussian_mechanism,
    guarantee,
    system_standard_normal,
)
from gradmm_core.settings import PrivacySettings


def mechanism(**changes: object) -> GaussianMechanism:
    values = {
        "epsilon": 0.05,
        "delta": 1e-4,
        "clipping_norm": 1.0,
        "adjacency": "add-or-remove",
        "calibration": "analytic",
    }
    return GaussianMechanism.model_validate(values | changes)


def test_sigma_of_the_paper_and_of_the_analytic_calibration() -> None:
    assert mechanism().sigma == pytest.approx(44.785, abs=1e-3)
    assert mechanism(calibration="paper").sigma == pytest.approx(86.872, abs=1e-3)


@settings(max_examples=60, deadline=None)
@given(epsilon=st.floats(0.01, 16), log_delta=st.floats(-12, -2))
def test_analytic_sigma_spends_delta_and_no_more(epsilon: float, log_delta: float) -> None:
    delta = 10**log_delta
    sigma = mechanism(epsilon=epsilon, delta=delta).sigma
    assert gaussian_delta(sigma, epsilon) <= delta

    def slow_delta(s: float) -> float:  # Balle and Wang, theorem 8, as printed
        return norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * norm.cdf(-0.5 / s - epsilon * s) - delta

    assert sigma == pytest.approx(brentq(slow_delta, sigma / 2, sigma * 2, xtol=1e-14, rtol=1e-12), rel=1e-5)


def test_the_papers_formula_is_refused_where_it_does_not_hold() -> None:
    assert gaussian_mechanism(PrivacySettings(epsilon=1.0, delta=1e-4, calibration="paper")) is not None
    with pytest.raises(InputError, match=r"privacy\.calibration: the paper's formula spends a delta of 0\.00027"):
        gaussian_mechanism(PrivacySettings(epsilon=10.0, delta=1e-4, calibration="paper"))


def test_replacing_a_record_costs_twice_the_noise_of_adding_one() -> None:
    assert mechanism(adjacency="replace").sensitivity == 2.0
    assert mechanism(adjacency="replace").sigma == pytest.approx(2 * mechanism().sigma)
    assert mechanism(clipping_norm=0.25).sigma == pytest.approx(0.25 * mechanism().sigma)


def test_noise_is_normal_with_the_right_deviation_and_never_the_same_twice() -> None:
    first, second = system_standard_normal((200, 500)), system_standard_normal((200, 500))
    assert kstest(first.ravel(), "norm").pvalue > 1e-6
    assert not np.isin(first, second).any()
    assert mechanism().noise((100_000,)).std() == pytest.approx(mechanism().sigma, rel=0.02)


def test_noise_ignores_all_global_seeds() -> None:
    draws = []
    for _ in range(2):
        np.random.seed(0)
        draws.append(mechanism().noise((8,)))
    assert not np.array_equal(draws[0], draws[1])


def test_an_unsafe_seed_repeats_the_noise_and_is_never_called_a_guarantee() -> None:
    unsafe = PrivacySettings(epsilon=1.0, delta=1e-5, unsafe_noise_seed=7)
    seeded = gaussian_mechanism(unsafe)
    assert seeded is not None
    assert np.array_equal(seeded.noise((8,)), seeded.noise((8,)))
    assert not guarantee(unsafe).safe
    assert "UNSAFE, no privacy guarantee" in guarantee(unsafe).sentence


def test_no_epsilon_is_called_no_guarantee() -> None:
    assert gaussian_mechanism(PrivacySettings()) is None
    assert guarantee(PrivacySettings()).sentence.startswith("No privacy guarantee")


def test_delta_defaults_to_less_than_one_in_the_number_of_records() -> None:
    chosen = gaussian_mechanism(PrivacySettings(epsilon=1.0, declared_records=67_349))
    assert chosen is not None
    assert chosen.delta == pytest.approx(67_349**-1.1)
    assert chosen.delta < 1 / 67_349
