from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm_core.privacy import GaussianMechanism
from gradmm_core.release_norms import CONSTANT, FEWEST_DIMENSIONS, MOST_DIMENSIONS, ReleaseNorms, settled
from gradmm_core.settings import TargetGradientSettings


def mechanism(epsilon: float, clipping_norm: float = 1.0) -> GaussianMechanism:
    return GaussianMechanism(
        epsilon=epsilon,
        delta=1e-5,
        clipping_norm=clipping_norm,
        adjacency="add-or-remove",
        calibration="analytic",
    )


@given(
    clipping_norm=st.floats(1e-3, 1e3), probe_share=st.floats(0, 0.999), class_sum_share=st.floats(0.001, 0.999)
)
def test_the_squares_of_the_parts_norms_add_up_to_that_of_the_whole(
    clipping_norm: float, probe_share: float, class_sum_share: float
) -> None:
    norms = ReleaseNorms.of(clipping_norm, probe_share, class_sum_share)
    assert math.hypot(*norms) == pytest.approx(clipping_norm, rel=1e-12)
    assert norms.gradient**2 == pytest.approx((1 - probe_share) * clipping_norm**2)
    assert norms.class_sum**2 == pytest.approx(class_sum_share * probe_share * clipping_norm**2)


def test_without_a_probe_the_gradient_has_all_of_it() -> None:
    assert ReleaseNorms.of(0.7, 0.0) == (0.7, 0.0, 0.0)


@given(epsilon=st.floats(0.02, 8), records=st.integers(100, 10**7), clipping_norm=st.sampled_from([0.1, 1.0, 7.0]))
def test_a_probe_has_as_many_directions_as_its_second_moment_can_carry(
    epsilon: float, records: int, clipping_norm: float
) -> None:
    settings = TargetGradientSettings()
    noise = mechanism(epsilon, clipping_norm)
    found = settled(settings, clipping_norm, noise.sigma, records)
    norms = ReleaseNorms.of(clipping_norm, settings.probe_share)
    deviation = noise.sigma / norms.second_moment * (1 + CONSTANT**2)

    def fits(dimensions: int) -> bool:
        return math.sqrt(2 * dimensions) * deviation / records <= 1 / (2 * dimensions)

    assert found == settled(settings, 1.0, mechanism(epsilon).sigma, records)  # C scales everything alike
    if not fits(FEWEST_DIMENSIONS):
        assert found == settings.model_copy(update={"probe_share": 0.0})
        return
    dimensions = found.probe_dimensions
    assert dimensions != "auto"
    assert fits(dimensions)
    assert dimensions == MOST_DIMENSIONS or not fits(dimensions + 1)
    assert found == settings.model_copy(update={"probe_dimensions": dimensions})


def test_directions_are_as_set_and_none_without_a_probe() -> None:
    for as_they_are in (TargetGradientSettings(probe_share=0.0), TargetGradientSettings(probe_dimensions=5)):
        assert settled(as_they_are, 1.0, 4000.0, 10) == as_they_are
        assert settled(as_they_are, 1.0, None, None) == as_they_are
    assert settled(TargetGradientSettings(), 1.0, None, None).probe_dimensions == MOST_DIMENSIONS
