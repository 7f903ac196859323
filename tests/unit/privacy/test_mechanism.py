from __future__ import annotations

import math
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import kstest

from gradmm.config.settings import PrivacySettings
from gradmm.errors import InputError
from gradmm.privacy.guarantee import guarantee
from gradmm.privacy.mechanism import (
    discrete_multiplier,
    gaussian_delta,
    gaussian_mechanism,
    system_standard_normal,
    zcdp_epsilon,
)
from tests.conftest import examples, make_mechanism

mechanism = partial(make_mechanism, epsilon=0.05, delta=1e-4)


def test_sigma_of_the_paper_and_of_the_analytic_calibration() -> None:
    assert mechanism().sigma == pytest.approx(44.785, abs=1e-3)
    assert mechanism(calibration="paper").sigma == pytest.approx(86.872, abs=1e-3)


def exact_delta(sigma: Any, epsilon: float) -> Any:
    """Evaluate theorem 8 of Balle and Wang (2018) as printed, with fifty digits."""
    with mpmath.workdps(50):
        s, e = mpmath.mpf(sigma), mpmath.mpf(epsilon)
        return mpmath.ncdf(0.5 / s - e * s) - mpmath.exp(e) * mpmath.ncdf(-0.5 / s - e * s)


def bisected_sigma(epsilon: float, delta: float) -> float:
    with mpmath.workdps(50):
        low, high = mpmath.mpf("1e-3"), mpmath.mpf("1e5")
        for _ in range(80):
            middle = mpmath.sqrt(low * high)
            low, high = (middle, high) if exact_delta(middle, epsilon) > delta else (low, middle)
    return float(high)


@examples(40)
@given(epsilon=st.floats(0.01, 16), log_delta=st.floats(-12, -2))
@example(epsilon=0.01, log_delta=-12.0)
@example(epsilon=16.0, log_delta=-2.0)
@example(epsilon=16.0, log_delta=-12.0)
@example(epsilon=0.01, log_delta=-2.0)
def test_analytic_sigma_equals_fifty_digits_of_bisection_and_never_spends_more_than_delta(
    epsilon: float, log_delta: float
) -> None:
    delta = 10**log_delta
    claimed = mechanism(epsilon=epsilon, delta=delta)
    sigma = claimed.sigma / claimed.sensitivity
    assert sigma == pytest.approx(bisected_sigma(epsilon, delta), rel=1e-9)
    assert exact_delta(sigma, epsilon) <= delta
    assert gaussian_delta(sigma, epsilon) == pytest.approx(float(exact_delta(sigma, epsilon)), rel=1e-8)


@examples(25)
@given(epsilon=st.floats(0.01, 16), log_delta=st.floats(-12, -2))
def test_discrete_noise_spends_its_epsilon_and_is_somewhat_larger(epsilon: float, log_delta: float) -> None:
    delta = 10**log_delta
    multiplier = discrete_multiplier(epsilon, delta)
    assert zcdp_epsilon(0.5 / multiplier**2, delta) <= epsilon
    assert 1 < multiplier / bisected_sigma(epsilon, delta) < 1.6
    # Bun and Steinke's (2016) conversion is looser.
    rho = 0.5 / multiplier**2
    assert rho + 2 * math.sqrt(rho * math.log(1 / delta)) >= epsilon * (1 - 1e-6)


def test_an_epsilon_below_what_zcdp_converts_to_is_refused_for_discrete_noise() -> None:
    with pytest.raises(InputError, match=r"epsilon of 1e-06 at a delta of 1e-10; set a larger one"):
        discrete_multiplier(1e-6, 1e-10)


def test_the_papers_formula_is_refused_where_it_does_not_hold() -> None:
    assert gaussian_mechanism(PrivacySettings(epsilon=1.0, delta=1e-4, calibration="paper")) is not None
    with pytest.raises(InputError, match=r"privacy\.calibration: the paper's formula spends a delta of 0\.00027"):
        gaussian_mechanism(PrivacySettings(epsilon=10.0, delta=1e-4, calibration="paper"))


def test_replacing_a_record_costs_twice_the_noise_of_adding_one() -> None:
    assert mechanism(adjacency="replace").sensitivity == 2 * mechanism().sensitivity
    assert mechanism(adjacency="replace").sigma == pytest.approx(2 * mechanism().sigma)
    assert mechanism(clipping_norm=0.25).sigma == pytest.approx(0.25 * mechanism().sigma)


def test_noise_is_normal_with_the_right_deviation_and_never_the_same_twice() -> None:
    first, second = system_standard_normal((200, 500)), system_standard_normal((200, 500))
    assert kstest(first.ravel(), "norm").pvalue > 1e-6
    assert not np.isin(first, second).any()
    assert mechanism().noise((100_000,)).std() == pytest.approx(mechanism().sigma, rel=0.02)


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_noise_is_finite_and_symmetric_at_the_ends(monkeypatch: pytest.MonkeyPatch, byte: bytes) -> None:
    monkeypatch.setattr("gradmm.privacy.mechanism.os.urandom", lambda size: byte * size)
    (value,) = system_standard_normal((1,))
    assert 8 < abs(value) < 9
    opposite = bytes([255 - byte[0]])
    monkeypatch.setattr("gradmm.privacy.mechanism.os.urandom", lambda size: opposite * size)
    assert system_standard_normal((1,))[0] == pytest.approx(-value, rel=1e-12)


def test_discrete_noise_is_normal_with_the_right_deviation() -> None:
    discrete = mechanism(epsilon=1.0, delta=1e-5, sampler="discrete")
    drawn = discrete.noise((20_000,))
    assert kstest(drawn / discrete.sigma, "norm").pvalue > 1e-6
    assert discrete.sigma > mechanism(epsilon=1.0, delta=1e-5).sigma


def test_noise_ignores_all_global_seeds() -> None:
    draws = []
    for _ in range(2):
        np.random.seed(0)
        draws.append(mechanism().noise((8,)))
    assert not np.array_equal(draws[0], draws[1])


def test_an_unsafe_seed_repeats_the_noise_and_voids_the_guarantee() -> None:
    unsafe = PrivacySettings(epsilon=1.0, delta=1e-5, unsafe_noise_seed=7)
    seeded = gaussian_mechanism(unsafe)
    assert seeded is not None
    assert np.array_equal(seeded.noise((8,)), seeded.noise((8,)))
    assert not guarantee(unsafe, seeded).safe
    assert "UNSAFE, no privacy guarantee" in guarantee(unsafe, seeded).sentence


def test_without_epsilon_no_guarantee_is_claimed() -> None:
    assert gaussian_mechanism(PrivacySettings()) is None
    assert guarantee(PrivacySettings(), None).sentence.startswith("No privacy guarantee")


def test_delta_defaults_to_less_than_one_in_the_number_of_records() -> None:
    chosen = gaussian_mechanism(PrivacySettings(epsilon=1.0, declared_records=67_349))
    assert chosen is not None
    assert chosen.delta == pytest.approx(67_349**-1.1)
    assert chosen.delta < 1 / 67_349
