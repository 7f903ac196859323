from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import log_softmax

from gradmm.privacy.sensitivity import CONSTANT
from gradmm.target.features import TextFeatures
from gradmm.target.probe import Moments, Probe, fit_probe
from gradmm.target.tables import moments_of, to_table

DIMENSIONS = 6
LABELS = [4, 0, 7]


def identity() -> TextFeatures:
    """Make features that equal their input, up to norm 1."""
    return TextFeatures(torch.zeros(DIMENSIONS, dtype=torch.float64), torch.eye(DIMENSIONS, dtype=torch.float64))


def records(count: int, spread: float = 0.1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw features around their classes' means, and the columns of their classes, of unequal size."""
    random = torch.Generator().manual_seed(seed)
    columns = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), count, replacement=True, generator=random)
    columns[:3] = torch.arange(3)
    means = spread * torch.randn(3, DIMENSIONS, generator=random, dtype=torch.float64)
    shape = torch.randn(DIMENSIONS, DIMENSIONS, generator=random, dtype=torch.float64)
    within = 0.03 * torch.randn(count, DIMENSIONS, generator=random, dtype=torch.float64) @ shape
    return means[columns] + within, columns


def moments(features: torch.Tensor, columns: torch.Tensor) -> Moments:
    vectors = identity().with_constant(features)
    sums = {label: vectors[columns == column].sum(dim=0) for column, label in enumerate(LABELS)}
    return Moments(sums, vectors.mT @ vectors)


def slow_logits(features: np.ndarray, columns: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Compute the logits of linear discriminant analysis by loops over records."""
    count, dimensions = features.shape
    means = np.array([features[columns == c].mean(axis=0) for c in range(3)])
    within = np.zeros((dimensions, dimensions))
    for row, column in zip(features, columns, strict=True):
        within += np.outer(row - means[column], row - means[column])
    within = (within + np.eye(dimensions)) / (count + dimensions)
    inverse = np.linalg.inv(within)
    middle = features.mean(axis=0)
    shares = np.array([(columns == c).mean() for c in range(3)])
    # mean - middle is a weighted sum of independent class means, each of variance dimensions / records by chance.
    factors = [[(1.0 if c == own else 0.0) - shares[c] for c in range(3)] for own in range(3)]
    chance = [sum(f**2 * dimensions / (s * count) for f, s in zip(of, shares, strict=True)) for of in factors]
    unit = [sum(f**2 for f in of) for of in factors]
    found = [(mean - middle) @ inverse @ (mean - middle) for mean in means]
    # Each class estimates the prior variance by itself; the estimates have weights by their precision.
    estimates = [(each - by_chance) / of for each, by_chance, of in zip(found, chance, unit, strict=True)]
    weights = [of / by_chance for of, by_chance in zip(unit, chance, strict=True)]
    prior = max(0.0, float(np.average(estimates, weights=weights)))
    shrunk = [
        middle + prior * of / (prior * of + by_chance) * (mean - middle)
        for mean, of, by_chance in zip(means, unit, chance, strict=True)
    ]
    return np.array([[-(p - m) @ inverse @ (p - m) / 2 for m in shrunk] for p in points])


@pytest.mark.parametrize("count", [5, 40, 2000])
def test_the_probe_is_linear_discriminant_analysis_of_the_records(count: int) -> None:
    features, columns = records(count)
    points, _ = records(20, seed=1)
    probe = fit_probe(identity(), moments(features, columns))
    expected = log_softmax(slow_logits(features.numpy(), columns.numpy(), points.numpy()), axis=1)
    for column, label in enumerate(LABELS):
        assert np.allclose(-probe.losses(points, label).numpy(), expected[:, column], atol=1e-8)


def test_shrinkage_is_near_one_for_many_records_and_near_zero_for_few() -> None:
    features, columns = records(3000)
    assert fit_probe(identity(), moments(features, columns)).shrinkage > 0.95
    shrinkage = [
        fit_probe(identity(), moments(*records(6, spread=0.0, seed=seed))).shrinkage for seed in range(20)
    ]
    assert np.mean(shrinkage) < 0.2


def test_a_rare_class_of_noise_alone_is_shrunk_although_the_others_are_well_known() -> None:
    """Two large classes far apart, and a rare one whose records are as many as its noise hides."""
    random = torch.Generator().manual_seed(0)
    dimensions, noise, sizes = 48, 20.0, (12_000, 12_000, 150)
    features = TextFeatures(torch.zeros(dimensions).double(), torch.eye(dimensions).double())
    means = torch.zeros(3, dimensions).double()
    means[0, 0], means[1, 0] = 0.2, -0.2
    worst = []
    for _ in range(20):
        sums = {}
        for label, (mean, size) in enumerate(zip(means, sizes, strict=True)):
            clean = features.with_constant(mean[None])[0] * size
            sums[label] = clean + noise * torch.randn(dimensions + 1, generator=random).double()
        points = means[2] + 0.14 * torch.randn(50, dimensions, generator=random).double()
        probe = fit_probe(features, Moments(sums, None, noise))
        worst.append(float(-probe.of_features(points)[:, 2].mean()))
        large = probe.of_features(means[:2])
        assert (large.argmax(dim=1) == torch.arange(2)).all()
    assert np.mean(worst) < 1.1 * math.log(3)  # log 3 is a uniform answer's
    assert max(worst) < 1.5 * math.log(3)


def test_two_classes_have_one_factor_however_unequal_they_are() -> None:
    """Their means differ from the common one along one line, so that the noise of either hides both."""
    features = identity()
    sums = {
        label: features.with_constant(torch.eye(DIMENSIONS).double()[label][None] * 0.3)[0] * size
        for label, size in ((0, 3000), (1, 100))
    }
    probe = fit_probe(features, Moments(sums, None, 5.0))
    assert 0 < probe.shrinkage < 1
    shares = torch.tensor([3000, 100]).double() / 3100
    torch.testing.assert_close(probe.weights @ shares, torch.zeros(DIMENSIONS).double(), rtol=0, atol=1e-9)


def test_without_a_second_moment_the_covariance_is_that_of_public_text() -> None:
    """1 / k in each of k directions: a second moment with just that gives the same probe."""
    features, columns = records(3000)
    sums = moments(features, columns).class_sums
    alone = Moments(sums, None)
    means, counts, _, _ = alone.class_means()
    within = torch.eye(DIMENSIONS).double() / DIMENSIONS
    second = (within + (means.mT * (counts / counts.sum())) @ means) * counts.sum() / (1 + CONSTANT**2)
    padded = torch.zeros(DIMENSIONS + 1, DIMENSIONS + 1).double()
    padded[:-1, :-1] = second
    found, expected = fit_probe(identity(), alone), fit_probe(identity(), Moments(sums, padded))
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.biases, expected.biases, rtol=1e-9, atol=1e-12)
    assert found.shrinkage == pytest.approx(expected.shrinkage)
    assert 0 < found.shrinkage < 1


def test_counts_are_no_smaller_than_twice_their_noise() -> None:
    clean = moments(*records(500))
    for noise in (0.0, 0.3, 40.0):
        counts = Moments(clean.class_sums, None, noise).class_means().counts
        floor = 2 * noise * (1 + CONSTANT**2) ** 0.5 / CONSTANT
        assert torch.allclose(counts, clean.class_means().counts.clamp_min(floor))


def noisy(clean: Moments, class_sum_noise: float, second_noise: float | None, seed: int) -> Moments:
    random = torch.Generator().manual_seed(seed)

    def drawn(value: torch.Tensor, deviation: float) -> torch.Tensor:
        return value + deviation * torch.randn(value.shape, generator=random, dtype=torch.float64)

    sums = {label: drawn(total, class_sum_noise) for label, total in clean.class_sums.items()}
    if second_noise is None:
        return Moments(sums, None, class_sum_noise)
    assert clean.second_moment is not None
    return Moments(sums, drawn(clean.second_moment, second_noise), class_sum_noise, second_noise)


@given(
    seed=st.integers(0, 10**6),
    class_sum_noise=st.floats(0, 1e4),
    second_noise=st.none() | st.floats(0, 1e4),
    count=st.integers(3, 300),
)
@example(seed=1, class_sum_noise=4.0, second_noise=0.0, count=3)  # eigenvalues below zero
def test_the_probe_is_finite_and_its_shrinkage_in_0_1_under_any_noise(
    seed: int, class_sum_noise: float, second_noise: float | None, count: int
) -> None:
    drawn = noisy(moments(*records(count)), class_sum_noise, second_noise, seed)
    probe = fit_probe(identity(), drawn)
    assert 0 <= probe.shrinkage <= 1
    points, _ = records(10, seed=1)
    total = sum(torch.exp(-probe.losses(points, label)) for label in LABELS)
    assert torch.allclose(torch.as_tensor(total), torch.ones(10, dtype=torch.float64))


def test_a_probe_of_pure_noise_is_shrunk_and_little_noise_changes_little() -> None:
    clean = moments(*records(2000))
    points, _ = records(50, seed=1)
    exact = fit_probe(identity(), clean).losses(points, LABELS[0])
    near = fit_probe(identity(), noisy(clean, 1e-5, 1e-5, 0)).losses(points, LABELS[0])
    assert torch.allclose(exact, near, atol=1e-2)
    shrinkage = [fit_probe(identity(), noisy(clean, 1e3, 1e3, seed)).shrinkage for seed in range(50)]
    assert np.mean(shrinkage) < 0.35  # above zero only if chance exceeds its expectation
    # With shrinkage 0, the probe is uniform.
    none = next(
        probe
        for seed in range(50)
        if (probe := fit_probe(identity(), noisy(clean, 1e3, 1e3, seed))).shrinkage == 0
    )
    assert torch.allclose(none.losses(points, LABELS[0]), torch.full((50,), np.log(3.0), dtype=torch.float64))


@pytest.mark.parametrize("second_noise", [0.0, 5.0, 500.0])
def test_weights_are_bounded_by_the_noise_in_every_direction(second_noise: float) -> None:
    count = 2000
    probe = fit_probe(identity(), noisy(moments(*records(count)), 0.0, second_noise, 3))
    floor = np.sqrt(2 * DIMENSIONS) * (1 + CONSTANT**2) * second_noise / count
    features, columns = records(count)
    means = torch.stack([features[columns == column].mean(dim=0) for column in range(3)])
    longest = (means - features.mean(dim=0)).norm(dim=1)
    allowed = longest / max(floor, 1 / (count + DIMENSIONS))
    assert probe.shrinkage > 0
    assert (probe.weights.norm(dim=0) <= allowed * (1 + 1e-6)).all()


def test_noise_in_the_second_moment_keeps_the_probe_from_unstable_directions() -> None:
    """The bound to which eigenvalues are raised is the largest eigenvalue of pure noise."""
    dimensions = 60
    bound = np.sqrt(2 * dimensions)
    worst = []
    for seed in range(20):
        drawn = torch.randn(dimensions, dimensions, generator=torch.Generator().manual_seed(seed))
        worst.append(float(torch.linalg.eigvalsh((drawn + drawn.mT) / 2).abs().max()))
    assert np.mean(worst) == pytest.approx(bound, rel=0.05)


def test_derivatives_of_losses_agree_with_finite_differences() -> None:
    features, columns = records(200)
    probe = fit_probe(identity(), moments(features, columns))
    points = (features[:4] / 2).clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: probe.losses(x, LABELS[1]), points)


def test_moments_survive_the_targets_table() -> None:
    drawn = noisy(moments(*records(50)), 0.5, 0.25, 0)
    gradients = {label: torch.full((2, 3), float(label)) for label in LABELS}
    table = to_table(gradients, drawn)
    back = moments_of(table.take(torch.randperm(len(table)).tolist()), LABELS, (0.5, 0.25))
    for label in LABELS:
        assert torch.allclose(back.class_sums[label], drawn.class_sums[label], rtol=1e-6)
    assert back.second_moment is not None
    assert drawn.second_moment is not None
    assert torch.allclose(back.second_moment, drawn.second_moment, rtol=1e-6)
    assert (back.class_sum_noise, back.second_moment_noise) == (0.5, 0.25)


def test_counts_come_from_the_constant() -> None:
    features, columns = records(500)
    sums = moments(features, columns).class_sums
    for column, label in enumerate(LABELS):
        count = float(sums[label][-1]) * (1 + CONSTANT**2) ** 0.5 / CONSTANT
        assert count == pytest.approx(int((columns == column).sum()))


def test_columns_are_in_the_order_of_the_labels() -> None:
    weights = torch.eye(DIMENSIONS, dtype=torch.float64)[:, :3] * 50
    probe = Probe(identity(), LABELS, weights, torch.zeros(3, dtype=torch.float64), 1.0)
    point = torch.eye(DIMENSIONS, dtype=torch.float64)[1:2]
    assert [float(probe.losses(point, label)) < 1e-9 for label in LABELS] == [False, True, False]
