from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.settings import TargetGradientSettings
from gradmm.privacy.sensitivity import (
    CONSTANT,
    MAX_DIMENSIONS,
    MIN_DIMENSIONS,
    ReleaseNorms,
    with_probe_dimensions,
)
from tests.conftest import make_mechanism


@given(
    clipping_norm=st.floats(1e-3, 1e3), probe_share=st.floats(0, 0.999), class_sum_share=st.floats(0.001, 0.999)
)
def test_the_squared_norms_of_the_parts_add_up_to_c_squared(
    clipping_norm: float, probe_share: float, class_sum_share: float
) -> None:
    norms = ReleaseNorms.of(clipping_norm, probe_share, class_sum_share)
    assert math.hypot(*norms) == pytest.approx(clipping_norm, rel=1e-12)
    assert norms.gradient**2 == pytest.approx((1 - probe_share) * clipping_norm**2)
    assert norms.class_sum**2 == pytest.approx(class_sum_share * probe_share * clipping_norm**2)


def test_without_a_probe_the_gradient_has_the_whole_norm() -> None:
    assert ReleaseNorms.of(0.7, 0.0) == (0.7, 0.0, 0.0)


@given(epsilon=st.floats(0.02, 8), records=st.integers(100, 10**7), clipping_norm=st.sampled_from([0.1, 1.0, 7.0]))
def test_the_probes_dimensions_are_limited_by_the_noise_of_its_second_moment(
    epsilon: float, records: int, clipping_norm: float
) -> None:
    settings = TargetGradientSettings()
    noise = make_mechanism(epsilon, clipping_norm=clipping_norm)
    found = with_probe_dimensions(settings, clipping_norm, noise.sigma, records)
    norms = ReleaseNorms.of(clipping_norm, settings.probe_share)
    deviation = noise.sigma / norms.second_moment * (1 + CONSTANT**2)

    def fits(dimensions: int) -> bool:
        return math.sqrt(2 * dimensions) * deviation / records <= 1 / (2 * dimensions)

    # C scales sensitivity and noise alike.
    assert found == with_probe_dimensions(settings, 1.0, make_mechanism(epsilon).sigma, records)
    if not fits(MIN_DIMENSIONS):
        assert found == settings.model_copy(update={"probe_share": 0.0})
        return
    dimensions = found.probe_dimensions
    assert dimensions != "auto"
    assert fits(dimensions)
    assert dimensions == MAX_DIMENSIONS or not fits(dimensions + 1)
    assert found == settings.model_copy(update={"probe_dimensions": dimensions})


def test_probe_dimensions_set_in_the_recipe_are_kept() -> None:
    for as_they_are in (TargetGradientSettings(probe_share=0.0), TargetGradientSettings(probe_dimensions=5)):
        assert with_probe_dimensions(as_they_are, 1.0, 4000.0, 10) == as_they_are
        assert with_probe_dimensions(as_they_are, 1.0, None, None) == as_they_are
    assert with_probe_dimensions(TargetGradientSettings(), 1.0, None, None).probe_dimensions == MAX_DIMENSIONS
