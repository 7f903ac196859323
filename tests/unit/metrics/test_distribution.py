"""Distances between sets of embeddings, compared with closed forms, matrix roots and double loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from sklearn.neighbors import NearestNeighbors

from gradmm.metrics.distribution import (
    at_equal_sizes,
    frechet_distance,
    half_sample_interval,
    nearest_distances,
    squared_mmd,
)
from tests.conftest import examples

SEEDS = st.integers(0, 2**32)


def random_rows(seed: int, rows: int, dims: int, shift: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, dims)) @ random.normal(size=(dims, dims)) + shift


def whitened(seed: int, rows: int, dims: int) -> np.ndarray:
    """Rows whose sample mean is zero and whose sample covariance is the identity, exactly."""
    centred = np.random.default_rng(seed).normal(size=(rows, dims))
    centred -= centred.mean(axis=0)
    return np.linalg.qr(centred)[0] * np.sqrt(rows - 1)


@given(seed=SEEDS, dims=st.integers(1, 6))
def test_frechet_distance_of_commuting_covariances_is_that_of_their_roots(seed: int, dims: int) -> None:
    random = np.random.default_rng(seed)
    turn = np.linalg.qr(random.normal(size=(dims, dims)))[0]
    deviations, means = random.uniform(0, 3, (2, dims)), random.normal(size=(2, dims))
    sets = [
        whitened(seed + i, rows, dims) * deviations[i] @ turn + means[i] for i, rows in enumerate((dims + 9, 40))
    ]
    expected = np.square(means[0] - means[1]).sum() + np.square(deviations[0] - deviations[1]).sum()
    assert frechet_distance(*sets) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(seed=SEEDS, dims=st.integers(2, 6))
def test_frechet_distance_is_its_formula_with_a_matrix_root(seed: int, dims: int) -> None:
    first, second = random_rows(seed, 30, dims), random_rows(seed + 1, 25, dims, shift=1.0)
    covariances = [np.cov(rows, rowvar=False) for rows in (first, second)]
    root = sqrtm(covariances[0] @ covariances[1])
    between = np.square(first.mean(axis=0) - second.mean(axis=0)).sum()
    expected = between + np.trace(covariances[0] + covariances[1] - 2 * np.real(root))
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_frechet_distance_needs_no_more_rows_than_dimensions() -> None:
    """Embedding the rows in more dimensions makes the covariances singular and changes nothing."""
    first, second = random_rows(0, 8, 3), random_rows(1, 8, 3, shift=0.5)
    wide = np.linalg.qr(np.random.default_rng(2).normal(size=(50, 3)))[0].T
    assert frechet_distance(first @ wide, second @ wide) == pytest.approx(frechet_distance(first, second))


@given(seed=SEEDS, rows=st.integers(2, 12), dims=st.integers(1, 20))
def test_frechet_distance_is_zero_to_itself_symmetric_and_never_negative(seed: int, rows: int, dims: int) -> None:
    first, second = random_rows(seed, rows, dims), random_rows(seed + 1, rows + 3, dims)
    scale = np.square(first).sum() + np.square(second).sum()
    assert abs(frechet_distance(first, first[::-1])) < 1e-9 * scale
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first))
    assert frechet_distance(first, second) > -1e-9 * scale


def slow_mmd(first: np.ndarray, second: np.ndarray, kernel: str) -> float:
    together = np.concatenate([first, second])
    pairs = [(i, j) for i in range(len(together)) for j in range(i)]
    median = np.median([np.linalg.norm(together[i] - together[j]) for i, j in pairs])

    def k(x: np.ndarray, y: np.ndarray) -> float:
        if kernel == "polynomial":
            return float(x @ y / len(x) + 1) ** 3
        return np.exp(-np.square(x - y).sum() / (2 * median**2))

    total = 0.0
    for rows in (first, second):
        n = len(rows)
        total += sum(k(rows[i], rows[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return total - 2 * sum(k(x, y) for x in first for y in second) / (len(first) * len(second))


@examples(40)
@given(seed=SEEDS, rows=st.integers(2, 7), others=st.integers(2, 7), kernel=st.sampled_from(["rbf", "polynomial"]))
def test_squared_mmd_is_its_double_loop(seed: int, rows: int, others: int, kernel) -> None:
    first, second = random_rows(seed, rows, 3), random_rows(seed + 1, others, 3, shift=0.3)
    assert squared_mmd(first, second, kernel) == pytest.approx(
        slow_mmd(first, second, kernel), rel=1e-8, abs=1e-10
    )


@pytest.mark.parametrize("kernel", ["rbf", "polynomial"])
def test_squared_mmd_is_unbiased_and_sees_a_shift(kernel) -> None:
    random = np.random.default_rng(0)
    alike = [squared_mmd(x, y, kernel) for x, y in random.normal(size=(400, 2, 20, 3))]
    assert abs(np.mean(alike)) < 3 * np.std(alike) / 20
    assert 0.3 < np.mean(np.array(alike) < 0) < 0.8
    assert squared_mmd(random.normal(size=(20, 3)), random.normal(2.0, 1.0, (20, 3)), kernel) > max(alike)


def test_squared_mmd_of_equal_rows_is_zero() -> None:
    assert squared_mmd(np.ones((3, 2)), np.ones((4, 2))) == pytest.approx(0.0)


@given(seed=SEEDS, rows=st.integers(1, 9), others=st.integers(1, 9))
def test_nearest_distances_equal_sklearns_neighbours(seed: int, rows: int, others: int) -> None:
    first, second = random_rows(seed, rows, 4), random_rows(seed + 1, others, 4)
    expected = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(second).kneighbors(first)[0][:, 0]
    assert nearest_distances(first, second) == pytest.approx(expected)
    assert nearest_distances(first, first) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("distance", [frechet_distance, squared_mmd])
def test_single_rows_are_refused(distance) -> None:
    with pytest.raises(ValueError, match="fewer than two"):
        distance(np.ones((1, 2)), np.ones((3, 2)))


def test_equal_sizes_are_drawn_without_replacement_by_each_seed() -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def record(first: np.ndarray, second: np.ndarray) -> float:
        seen.append((first, second))
        return float(len(seen))

    few, many = np.arange(10.0).reshape(5, 2), np.arange(60.0).reshape(30, 2)
    assert at_equal_sizes(record, few, many, [3, 4, 3]) == [1.0, 2.0, 3.0]
    for first, second in seen:
        assert first.tolist() == few.tolist()
        assert len(np.unique(second, axis=0)) == 5
        assert set(second[:, 0]) <= set(many[:, 0])
    assert seen[0][1].tolist() == seen[2][1].tolist() != seen[1][1].tolist()
    at_equal_sizes(record, few, many, [0], size=2)
    assert [len(rows) for rows in seen[-1]] == [2, 2]


def test_half_samples_vary_as_the_set_does_about_its_population() -> None:
    """The distance between means has a known standard error: sqrt(2 / n) for unit variances."""
    first, second = whitened(0, 200, 1), whitened(1, 200, 1) - 3.0
    between = lambda a, b: float(a.mean() - b.mean())  # noqa: E731
    low, high = half_sample_interval(between, first, second, range(2000))
    assert (low + high) / 2 == pytest.approx(3.0, abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(2 / 200), rel=0.08)
