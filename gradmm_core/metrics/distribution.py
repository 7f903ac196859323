"""Distances between two sets of texts, computed in float64 from their embeddings.

The Fréchet distance has a bias that depends on the number of rows. Sets are therefore compared at equal sizes
(`at_equal_sizes`), and distances are comparable only for the same size.
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

#: A distance between two sets of embeddings.
Distance = Callable[[Rows, Rows], float]


def frechet_distance(first: Rows, second: Others) -> float:
    """Return the squared Fréchet distance between Gaussians fitted to two sets (Dowson and Landau 1982; FID).

    ||m1 - m2||^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), with unbiased covariances. With C = R^T R, the last trace is the
    sum of the singular values of R1 R2^T. This avoids a matrix square root and is stable with fewer rows than
    dimensions.

    Raises:
        ValueError: for a set of fewer than two rows.
    """
    _require_two_rows(first, second)
    roots = [_covariance_root(rows.astype(np.float64)) for rows in (first, second)]
    between = first.mean(axis=0, dtype=np.float64) - second.mean(axis=0, dtype=np.float64)
    spread = sum(float(np.square(root).sum()) for root in roots)
    common = np.linalg.svd(roots[0] @ roots[1].T, compute_uv=False).sum()
    return float(between @ between + spread - 2 * common)


def squared_mmd(first: Rows, second: Others, kernel: Literal["rbf", "polynomial"] = "rbf") -> float:
    """Return the unbiased squared maximum mean discrepancy; its expectation is 0 for equal distributions.

    Gretton et al. 2012, equation 3. `rbf`: exp(-d^2 / (2 s^2)), where s is the median distance between rows of the
    combined sets. `polynomial`: (x.y / dims + 1)^3, as in the kernel inception distance (Bińkowski et al. 2018).

    Raises:
        ValueError: for a set of fewer than two rows.
    """
    _require_two_rows(first, second)
    first, second = first.astype(np.float64), second.astype(np.float64)
    width = first.shape[1] if kernel == "polynomial" else _median_distance(np.concatenate([first, second]))

    def similarity(rows: Rows, others: Others) -> Float[np.ndarray, "rows others"]:
        if kernel == "polynomial":
            return polynomial_kernel(rows, others, degree=3, gamma=1 / width, coef0=1)
        return rbf_kernel(rows, others, gamma=1 / (2 * width**2))

    within = sum(_mean_off_diagonal(similarity(rows, rows)) for rows in (first, second))
    return float(within - 2 * similarity(first, second).mean())


def nearest_distances(rows: Rows, others: Others) -> Float[np.ndarray, " rows"]:
    """Return the Euclidean distance from each row to the nearest of `others`."""
    return pairwise_distances_argmin_min(rows.astype(np.float64), others.astype(np.float64))[1]


def mean_nearest_distance(rows: Rows, others: Others) -> float:
    """Return the mean of `nearest_distances`."""
    return float(nearest_distances(rows, others).mean())


def at_equal_sizes(
    distance: Distance, first: Rows, second: Others, seeds: Sequence[int], size: int | None = None
) -> list[float]:
    """Return `distance` between random samples of equal size from both sets, once per seed.

    Rows are drawn without replacement, because a row drawn twice would be at distance zero from itself.

    Args:
        size: default, the size of the smaller set, which is then used as a whole for every seed.
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
    """Return a confidence interval of the distance between sets of half the smaller set's size.

    A half-sample drawn without replacement varies about the set as the set varies about its population, if the
    distance is a smooth function of means (McCarthy 1969; Shao and Tu 1995, chapter 5). The ordinary bootstrap
    draws rows twice, which biases kernels and covariances of few rows.
    """
    size = min(len(first), len(second)) // 2
    values = at_equal_sizes(distance, first, second, seeds, size)
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _covariance_root(rows: Rows) -> Float[np.ndarray, "rank dims"]:
    """Return R with R^T R = the covariance, with at most as many rows as dimensions."""
    centred = (rows - rows.mean(axis=0)) / np.sqrt(len(rows) - 1)
    return np.asarray(np.linalg.qr(centred, mode="r")) if len(rows) > rows.shape[1] else centred


def _median_distance(rows: Rows) -> float:
    """Return the median distance between two rows; 1 if it is zero."""
    return float(np.median(pdist(rows))) or 1.0


def _mean_off_diagonal(matrix: Float[np.ndarray, "rows rows"]) -> float:
    count = len(matrix)
    return float((matrix.sum() - np.trace(matrix)) / (count * (count - 1)))


def _require_two_rows(*sets: np.ndarray) -> None:
    if any(len(rows) < 2 for rows in sets):
        raise ValueError("a set of fewer than two rows has no variance")
