"""Canaries in a release: they go through every part of it, and none affects another's score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradmm.audits.canaries import CANARY_NORM, CanaryRelease
from gradmm.privacy.sensitivity import ReleaseNorms
from tests.conftest import make_mechanism

C = 0.7
CANARIES = 40


#: Shares of C^2 for a probe and for token sums, and the class sums' share of the probe's.
SHARES = [(0.0, 0.0, 0.3), (0.5, 0.0, 0.3), (0.3, 0.6, 0.3), (0.0, 0.5, 0.3), (0.5, 0.3, 1.0)]


def release(
    probe_share: float, token_share: float = 0.0, class_sum_share: float = 0.3, **changes: Any
) -> CanaryRelease:
    mechanism = make_mechanism(clipping_norm=C, **changes)
    return CanaryRelease(mechanism, ReleaseNorms.of(C, probe_share, token_share, class_sum_share), CANARIES)


def only(canary: int) -> np.ndarray:
    return np.arange(CANARIES) == canary


@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("canary", [0, 1, 17, CANARIES - 1])
def test_a_canary_moves_every_part_of_its_class_by_that_parts_norm(
    shares: tuple[float, float, float], canary: int, sampler: str
) -> None:
    canaries = release(*shares, sampler=sampler)
    probe_share, token_share, class_sum_share = shares
    assert float(canaries.gradients[canary].norm()) == pytest.approx(CANARY_NORM * C)
    norms = canaries.norms
    moved = {part: np.linalg.norm(value) for part, value in canaries.clean(canaries.sums(only(canary))).items()}
    own, other = canary % 2, 1 - canary % 2
    expected = {f"gradient {own}": norms.gradient, f"gradient {other}": 0.0}
    if probe_share:
        expected |= {f"class sum {own}": norms.class_sum, f"class sum {other}": 0.0}
    if probe_share and class_sum_share < 1:
        expected["second moment"] = norms.second_moment
    if token_share:
        expected |= {f"token sum {own}": norms.token_sum, f"token sum {other}": 0.0}
    assert moved == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("adjacency", ["add-or-remove", "replace"])
def test_no_canary_affects_the_score_of_another(shares: tuple[float, float, float], adjacency: str) -> None:
    canaries = release(*shares, adjacency=adjacency)
    included = np.random.default_rng(0).random(CANARIES) < 0.5
    nobody = np.zeros(CANARIES, dtype=bool)
    absent, scores = (canaries.scores(canaries.clean(canaries.sums(those))) for those in (nobody, included))
    np.testing.assert_allclose(scores - absent, np.where(included, canaries.shift, 0.0), atol=1e-12)


def test_a_canary_moves_the_sums_by_the_sensitivity_unless_its_negative_has_the_same_squares() -> None:
    assert release(0.5).shift == pytest.approx(C)
    assert release(0.3, 0.6).shift == pytest.approx(C)
    assert release(0.3, 0.6, 1.0).shift == pytest.approx(C)
    assert release(0.3, 0.6, 1.0, adjacency="replace").shift == pytest.approx(2 * C)
    assert release(0.0, adjacency="replace").shift == pytest.approx(2 * C)
    assert release(0.0, 0.6, adjacency="replace").shift == pytest.approx(2 * C)
    norms = ReleaseNorms.of(C, 0.5)
    both = 2 * (norms.gradient**2 + norms.class_sum**2) ** 0.5
    assert release(0.5, adjacency="replace").shift == pytest.approx(both)


@pytest.mark.parametrize("shares", SHARES)
def test_a_release_is_the_clean_vector_plus_noise_in_each_coordinate(shares: tuple[float, float, float]) -> None:
    canaries = release(*shares)
    sums = canaries.sums(only(3))
    clean, first, second = canaries.clean(sums), canaries.released(sums), canaries.released(sums)
    assert clean.keys() == first.keys()
    for part, value in clean.items():
        assert value.shape == first[part].shape
        noise = first[part] - value
        assert np.abs(noise).min() > 0
        assert 0.5 < noise.std() / canaries.mechanism.sigma < 1.5
        assert not np.isin(noise, second[part] - value).any()
