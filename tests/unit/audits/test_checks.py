"""The audit's checks: their limits are calibrated, and they find noise that is too small, too large or shared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.audits.checks import Check, NoiseSample, check_sensitivity, required_sigma
from gradmm.audits.mechanism_audit import CanaryRelease
from gradmm.privacy.sensitivity import ReleaseNorms
from tests.conftest import examples, make_mechanism

#: Releases, and coordinates of two parts.
RELEASES, FIRST, SECOND = 40, 64, 100

Draw = Callable[[np.random.Generator, int], dict[str, np.ndarray]]


@given(
    epsilon=st.floats(0.01, 20),
    delta=st.floats(1e-12, 1e-2),
    clipping_norm=st.floats(0.01, 100),
    adjacency=st.sampled_from(["add-or-remove", "replace"]),
)
@examples(60)
def test_the_required_sigma_is_the_mechanisms(
    epsilon: float, delta: float, clipping_norm: float, adjacency: str
) -> None:
    claim = make_mechanism(epsilon=epsilon, delta=delta, clipping_norm=clipping_norm, adjacency=adjacency)
    assert required_sigma(claim) == pytest.approx(claim.sigma, rel=2e-6)  # the slack for rounded sums is 1e-6


def test_the_required_sigma_follows_the_calibration() -> None:
    claim = make_mechanism(adjacency="replace", clipping_norm=0.3, calibration="paper", epsilon=0.5)
    assert required_sigma(claim) == pytest.approx(claim.sigma, rel=2e-6)


@given(
    epsilon=st.floats(0.01, 20),
    delta=st.floats(1e-12, 1e-2),
    adjacency=st.sampled_from(["add-or-remove", "replace"]),
)
@examples(60)
def test_the_required_sigma_of_the_discrete_sampler_is_the_mechanisms(
    epsilon: float, delta: float, adjacency: str
) -> None:
    """The mechanism has it from dp-accounting, whose orders are a grid: it is larger by 1e-4 at most."""
    claim = make_mechanism(epsilon=epsilon, delta=delta, adjacency=adjacency, sampler="discrete")
    assert 1 - 1e-8 < claim.sigma / required_sigma(claim) < 1 + 1e-4


# A record's reach


@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.5, 0.0), (0.99, 0.0), (0.3, 0.6), (0.0, 0.5), (0.3, 0.6, 1.0)])
@pytest.mark.parametrize("clipping_norm", [1e-3, 0.7, 300.0])
def test_no_record_moves_the_sums_by_more_than_the_clipping_norm(
    sampler: str, shares: tuple[float, ...], clipping_norm: float
) -> None:
    claim = make_mechanism(sampler=sampler, clipping_norm=clipping_norm)
    release = CanaryRelease(claim, ReleaseNorms.of(clipping_norm, *shares), 64)
    check = check_sensitivity(release, np.random.default_rng(0))
    assert check.passes
    assert check.measured == pytest.approx(1.0, abs=2e-4)  # the discrete sampler's grid shortens vectors
    assert check.high == (1.0 if sampler == "discrete" else 1 + 2.0**-20)


def test_a_sum_that_is_not_a_number_fails() -> None:
    check = Check(test="sensitivity", draws=1, measured=np.inf, low=0.999, high=1.0)
    assert not check.passes
    assert not check.model_copy(update={"measured": np.nan}).passes


# The noise


def independent(rng: np.random.Generator, _: int) -> dict[str, np.ndarray]:
    return {"first": rng.normal(size=FIRST), "second": rng.normal(size=SECOND)}


def sample_of(draw: Draw, seed: int, sigma: float = 1.0, releases: int = RELEASES) -> NoiseSample:
    rng, sample = np.random.default_rng(seed), NoiseSample(sigma)
    for number in range(releases):
        sample.add({part: sigma * values for part, values in draw(rng, number).items()})
    return sample


def failed(sample: NoiseSample, confidence: float = 0.9999) -> set[tuple[str, str | None]]:
    return {(check.test, check.part) for check in sample.checks(confidence) if not check.passes}


@pytest.mark.parametrize("sigma", [1e-6, 1.0, 1e6])
def test_independent_noise_passes_at_any_scale(sigma: float) -> None:
    assert failed(sample_of(independent, 0, sigma)) == set()


def test_independent_noise_fails_as_often_as_the_confidence_says() -> None:
    """At most 10% of 300 samples fail each check, within four standard errors."""
    results = [failed(sample_of(independent, seed, releases=10), 0.9) for seed in range(300)]
    for test in ("noise", "correlation"):
        share = np.mean([any(check == test for check, _ in each) for each in results])
        assert 0.02 < share < 0.1 + 4 * (0.1 * 0.9 / 300) ** 0.5


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.93, 1.07, 2.0])
def test_noise_of_another_size_is_found_in_the_part_that_has_it(factor: float) -> None:
    def wrong(rng: np.random.Generator, number: int) -> dict[str, np.ndarray]:
        noise = independent(rng, number)
        return noise | {"second": factor * noise["second"]}

    found = failed(sample_of(wrong, 1))
    assert ("noise", "second") in found
    assert ("noise", "first") not in found


def test_two_hundred_thousand_draws_show_one_percent() -> None:
    def wrong(rng: np.random.Generator, _: int) -> dict[str, np.ndarray]:
        return {"only": 0.99 * rng.normal(size=2000)}

    assert failed(sample_of(wrong, 2, releases=100)) == {("noise", "only")}


def same_for_both_parts(rng: np.random.Generator, _: int) -> dict[str, np.ndarray]:
    noise = rng.normal(size=SECOND)
    return {"first": noise[:FIRST], "second": noise}


def negative_in_the_other_part(rng: np.random.Generator, _: int) -> dict[str, np.ndarray]:
    noise = rng.normal(size=FIRST)
    return {"first": noise, "second": -noise}


def same_for_neighbours(rng: np.random.Generator, _: int) -> dict[str, np.ndarray]:
    return {"first": np.repeat(rng.normal(size=FIRST // 2), 2), "second": rng.normal(size=SECOND)}


def same_in_each_release(_: np.random.Generator, __: int) -> dict[str, np.ndarray]:
    return independent(np.random.default_rng(3), 0)


def repeated_once(rng: np.random.Generator, number: int) -> dict[str, np.ndarray]:
    return independent(np.random.default_rng(4) if number in (7, 31) else rng, number)


def second_part_kept_for_the_next_release(_: np.random.Generator, number: int) -> dict[str, np.ndarray]:
    first, second = np.random.default_rng([5, number]), np.random.default_rng([6, number // 2])
    return {"first": first.normal(size=FIRST), "second": second.normal(size=SECOND)}


@pytest.mark.parametrize(
    "draw",
    [
        same_for_both_parts,
        negative_in_the_other_part,
        same_for_neighbours,
        same_in_each_release,
        repeated_once,
        second_part_kept_for_the_next_release,
    ],
)
def test_shared_noise_is_found(draw: Draw) -> None:
    assert ("correlation", None) in failed(sample_of(draw, 7))
