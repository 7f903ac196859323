"""How far one set of texts is from another, by their embeddings.

The Fréchet distance depends on how many rows there are as much as on what they are, so sets are compared at equal
sizes (`at_equal_sizes`), and figures of different sizes with none but their own. Everything is in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.spatial.distance import pdist
from sklearn.metrics import pairwise_distances_argmin_min
from sklearn.metrics.pairwise import polynomial_kernel, rbf_kernel

Rows = Float[np.ndarray, "rows dims"]
Others = Float[np.ndarray, "others dims"]

#: Between two sets of embeddings.
Distance = Callable[[Rows, Rows], float]


def frechet_distance(first: Rows, second: Others) -> float:
    """Squared Fréchet distance between the Gaussians fitted to two sets (Dowson and Landau 1982; FID).

    ||m1 - m2||^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), with the covariances' denominators one less than the rows. With
    C = R^T R, the last trace is the sum of the singular values of R1 R2^T: no root of a matrix, and no trouble
    with fewer rows than dimensions.

    Raises:
        ValueError: for a set of fewer than two rows.
    """
    _need_two(first, second)
    roots = [_covariance_root(rows.astype(np.float64)) for rows in (first, second)]
    between = first.mean(axis=0, dtype=np.float64) - second.mean(axis=0, dtype=np.float64)
    spread = sum(float(np.square(root).sum()) for root in roots)
    common = np.linalg.svd(roots[0] @ roots[1].T, compute_uv=False).sum()
    return float(between @ between + spread - 2 * common)


def squared_mmd(first: Rows, second: Others, kernel: Literal["rbf", "polynomial"] = "rbf") -> float:
    """Squared maximum mean discrepancy, unbiased: near 0, and as often below it, for sets of one distribution.

    Gretton et al. 2012, equation 3. `rbf`: exp(-d^2 / (2 s^2)), where s is the median distance of two rows of both
    sets together. `polynomial`: (x.y / dims + 1)^3, as in the kernel inception distance (Bińkowski et al. 2018).

    Raises:
        ValueError: for a set of fewer than two rows.
    """
    _need_two(first, second)
    first, second = first.astype(np.float64), second.astype(np.float64)
    width = first.shape[1] if kernel == "polynomial" else _median_distance(np.concatenate([first, second]))

    def alike(rows: Rows, others: Others) -> Float[np.ndarray, "rows others"]:
        if kernel == "polynomial":
            return polynomial_kernel(rows, others, degree=3, gamma=1 / width, coef0=1)
        return rbf_kernel(rows, others, gamma=1 / (2 * width**2))

    inside = sum(_mean_off_diagonal(alike(rows, rows)) for rows in (first, second))
    return float(inside - 2 * alike(first, second).mean())


def nearest_distances(rows: Rows, others: Others) -> Float[np.ndarray, " rows"]:
    """The Euclidean distance of each row to the nearest one of `others`."""
    return pairwise_distances_argmin_min(rows.astype(np.float64), others.astype(np.float64))[1]


def mean_nearest_distance(rows: Rows, others: Others) -> float:
    """The mean of `nearest_distances`: how far a row is from what is most like it among the others."""
    return float(nearest_distances(rows, others).mean())


def at_equal_sizes(
    distance: Distance, first: Rows, second: Others, seeds: Sequence[int], size: int | None = None
) -> list[float]:
    """`distance` between as many random rows of each set, for each seed.

    Rows are drawn without replacement: a row drawn twice would be near to itself.

    Args:
        size: default, as many as the smaller set has, whose rows are then the same for every seed.
    """
    size = min(len(first), len(second)) if size is None else size
    values = []
    for seed in seeds:
        draws = np.random.default_rng(seed)
        of_first, of_second = (rows[np.sort(draws.permutation(len(rows))[:size])] for rows in (first, second))
        values.append(distance(of_first, of_second))
    return values


def half_sample_interval(
    distance: Distance, first: Rows, second: Others, seeds: Sequence[int], confidence: float = 0.95
) -> tuple[float, float]:
    """Between which the distance lies, for sets of half the smaller one's size, by drawing such sets anew.

    A half of a set drawn without replacement varies about the set as the set does about what it was drawn from,
    as long as the distance is a smooth function of means (McCarthy 1969; Shao and Tu 1995, chapter 5). The
    ordinary bootstrap would draw rows twice, which kernels and covariances of few rows mistake for likeness.
    """
    size = min(len(first), len(second)) // 2
    values = at_equal_sizes(distance, first, second, seeds, size)
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _covariance_root(rows: Rows) -> Float[np.ndarray, "rank dims"]:
    """R with R^T R = the covariance, and no more rows than dimensions."""
    centred = (rows - rows.mean(axis=0)) / np.sqrt(len(rows) - 1)
    return np.asarray(np.linalg.qr(centred, mode="r")) if len(rows) > rows.shape[1] else centred


def _median_distance(rows: Rows) -> float:
    """Of two different rows; 1 where most are the same row, which have no scale."""
    return float(np.median(pdist(rows))) or 1.0


def _mean_off_diagonal(matrix: Float[np.ndarray, "rows rows"]) -> float:
    count = len(matrix)
    return float((matrix.sum() - np.trace(matrix)) / (count * (count - 1)))


def _need_two(*sets: np.ndarray) -> None:
    if any(len(rows) < 2 for rows in sets):
        raise ValueError("a set of fewer than two rows has no spread")
