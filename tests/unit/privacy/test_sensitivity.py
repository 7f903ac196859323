from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.settings import TargetGradientSettings
from gradmm.privacy.sensitivity import (
    CLASS_SUM_SHARE,
    CONSTANT,
    MAX_DIMENSIONS,
    MIN_DIMENSIONS,
    ReleaseNorms,
    tokens_fit,
    with_parts_that_fit,
)
from tests.conftest import make_mechanism


@given(
    clipping_norm=st.floats(1e-3, 1e3),
    probe_share=st.floats(0, 0.999),
    token_share_of_rest=st.floats(0, 0.999),
    class_sum_share=st.floats(0.001, 1),
)
def test_the_squared_norms_of_the_parts_add_up_to_c_squared(
    clipping_norm: float, probe_share: float, token_share_of_rest: float, class_sum_share: float
) -> None:
    token_share = token_share_of_rest * (1 - probe_share)
    norms = ReleaseNorms.of(clipping_norm, probe_share, token_share, class_sum_share)
    assert math.hypot(*norms) == pytest.approx(clipping_norm, rel=1e-12)
    assert norms.gradient**2 == pytest.approx((1 - probe_share - token_share) * clipping_norm**2)
    assert norms.token_sum**2 == pytest.approx(token_share * clipping_norm**2)
    assert (norms.second_moment == 0) == (class_sum_share == 1 or probe_share == 0)
    assert norms.class_sum**2 == pytest.approx(class_sum_share * probe_share * clipping_norm**2)


def test_without_a_probe_the_gradient_has_the_whole_norm() -> None:
    assert ReleaseNorms.of(0.7, 0.0) == (0.7, 0.0, 0.0, 0.0)


@given(epsilon=st.floats(0.02, 8), records=st.integers(100, 10**7), clipping_norm=st.sampled_from([0.1, 1.0, 7.0]))
def test_the_probes_dimensions_are_limited_by_the_noise_of_its_second_moment(
    epsilon: float, records: int, clipping_norm: float
) -> None:
    settings = TargetGradientSettings(probe_share=0.5, token_share=0.0, probe_covariance="records")
    noise = make_mechanism(epsilon, clipping_norm=clipping_norm)
    found = with_parts_that_fit(settings, clipping_norm, noise.sigma, records, 2)
    norms = ReleaseNorms.of(clipping_norm, settings.probe_share)
    deviation = noise.sigma / norms.second_moment * (1 + CONSTANT**2)

    def fits(dimensions: int) -> bool:
        return math.sqrt(2 * dimensions) * deviation / records <= 1 / (2 * dimensions)

    # C scales sensitivity and noise alike.
    assert found == with_parts_that_fit(settings, 1.0, make_mechanism(epsilon).sigma, records, 2)
    if not fits(MIN_DIMENSIONS):
        assert found == settings.model_copy(update={"probe_share": 0.0})
        return
    dimensions = found.probe_dimensions
    assert dimensions != "auto"
    assert fits(dimensions)
    assert dimensions == MAX_DIMENSIONS or not fits(dimensions + 1)
    assert found == settings.model_copy(update={"probe_dimensions": dimensions})


def test_dimensions_that_are_set_need_no_declared_records() -> None:
    settings = TargetGradientSettings(probe_share=0.3, probe_dimensions=16, token_share=0.0)
    found = with_parts_that_fit(settings, 1.0, make_mechanism(1.0).sigma, None, 2)
    assert (found.probe_dimensions, found.probe_share) == (16, 0.3)


@given(
    epsilon=st.floats(0.02, 8),
    records=st.integers(20, 10**6),
    clipping_norm=st.sampled_from([0.1, 1.0, 7.0]),
    asked=st.sampled_from(["auto", "public"]),
    probe_share=st.sampled_from([0.1, 0.9]),
    classes=st.sampled_from([2, 6, 20]),
)
def test_class_sums_alone_are_released_if_the_noise_leaves_counts_but_no_second_moment(
    epsilon: float, records: int, clipping_norm: float, asked: str, probe_share: float, classes: int
) -> None:
    shares = TargetGradientSettings(probe_share=probe_share, token_share=0.0)
    settings = shares.model_copy(update={"probe_covariance": asked})
    sigma = make_mechanism(epsilon, clipping_norm=clipping_norm).sigma
    found = with_parts_that_fit(settings, clipping_norm, sigma, records, classes)
    by_records = settings.model_copy(update={"probe_covariance": "records"})
    whole = with_parts_that_fit(by_records, clipping_norm, sigma, records, classes)
    count_noise = sigma / (clipping_norm * probe_share**0.5) * math.sqrt(1 + CONSTANT**2) / CONSTANT
    beside_a_second_moment = count_noise / CLASS_SUM_SHARE**0.5
    if asked == "auto" and whole.probe_share and beside_a_second_moment <= records / classes / 16:
        assert found == whole
    elif count_noise <= min(records / 16, records / classes / 2):
        resolved = {"probe_covariance": "public", "probe_dimensions": MIN_DIMENSIONS}
        assert found == settings.model_copy(update=resolved)
        assert ReleaseNorms.of_target(clipping_norm, found).second_moment == 0
    else:
        assert found == settings.model_copy(update={"probe_share": 0.0})


def test_with_many_classes_a_second_moment_takes_more_records() -> None:
    """Six emotions under epsilon 0.05: sixteen directions fit, and the means of the rare classes are noise."""
    settings, sigma = TargetGradientSettings(token_share=0.0, probe_share=0.95), make_mechanism(0.05).sigma
    for classes, covariance in ((2, "records"), (6, "public")):
        found = with_parts_that_fit(settings, 1.0, sigma, 20_000, classes)
        assert found.probe_covariance == covariance
    by_records = settings.model_copy(update={"probe_covariance": "records"})
    assert with_parts_that_fit(by_records, 1.0, sigma, 20_000, 6).probe_covariance == "records"


def test_without_noise_the_probe_has_the_covariance_that_is_asked_for() -> None:
    for asked, found, dimensions in (
        ("auto", "records", MAX_DIMENSIONS),
        ("records", "records", MAX_DIMENSIONS),
        ("public", "public", MIN_DIMENSIONS),
    ):
        settings = TargetGradientSettings(probe_share=0.5, token_share=0.0)
        settings = settings.model_copy(update={"probe_covariance": asked})
        resolved = with_parts_that_fit(settings, 1.0, None, None, 2)
        assert (resolved.probe_covariance, resolved.probe_dimensions) == (found, dimensions)


def test_a_release_without_class_sums_alone_keeps_the_key_that_it_had() -> None:
    settings = TargetGradientSettings(probe_dimensions=16)
    kept = [settings.model_copy(update={"probe_covariance": each}).key_fields() for each in ("auto", "records")]
    assert kept[0] == kept[1]
    assert "probe_covariance" not in kept[0]
    alone = settings.model_copy(update={"probe_covariance": "public"})
    assert alone.key_fields() == kept[0] | {"probe_covariance": "public"}
    none = alone.model_copy(update={"probe_share": 0.0})
    assert "probe_covariance" not in none.key_fields()


def test_probe_dimensions_set_in_the_recipe_are_kept() -> None:
    probe = TargetGradientSettings(probe_share=0.5, token_share=0.0)
    none = probe.model_copy(update={"probe_share": 0.0})
    five = {"probe_dimensions": 5, "probe_covariance": "records"}
    for as_they_are in (
        none,
        probe.model_copy(update=five),
        probe.model_copy(update=five | {"probe_covariance": "public"}),
    ):
        assert with_parts_that_fit(as_they_are, 1.0, 4000.0, 10, 2) == as_they_are
        assert with_parts_that_fit(as_they_are, 1.0, None, None, 2) == as_they_are
    unresolved = probe.model_copy(update={"probe_dimensions": 5})
    assert with_parts_that_fit(unresolved, 1.0, 4000.0, 10, 2) == probe.model_copy(update=five)


@pytest.mark.parametrize("clipping_norm", [0.1, 1.0, 7.0])
@pytest.mark.parametrize(("probe_share", "left"), [(0.3, 0.9), (0.0, 0.0)])
def test_token_rates_are_released_if_a_common_token_stands_out_from_the_noise(
    clipping_norm: float, probe_share: float, left: float
) -> None:
    settings = TargetGradientSettings(
        probe_share=probe_share, token_share=0.6, probe_dimensions=8, probe_covariance="records"
    )
    sigma = make_mechanism(1.0, clipping_norm=clipping_norm).sigma
    norm = ReleaseNorms.of(clipping_norm, probe_share, 0.6).token_sum
    moved = 3 * sigma / norm * math.sqrt(1 + CONSTANT**2)
    for classes in (2, 6):
        needed = math.ceil(classes * moved * 4 / 0.05)
        assert tokens_fit(norm, sigma, needed, classes)
        assert not tokens_fit(norm, sigma, needed - 1, classes)
        assert with_parts_that_fit(settings, clipping_norm, sigma, needed, classes) == settings
        fewer = with_parts_that_fit(settings, clipping_norm, sigma, needed - 1, classes)
        # The probe, if there is one, has the share of the token rates.
        assert (fewer.token_share, fewer.probe_share) == (0.0, pytest.approx(left))
    assert with_parts_that_fit(settings, clipping_norm, None, None, 2) == settings
