"""Compare herding and k-center with plain double loops, and with all subsets of small sets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.evaluation.coresets import CORESETS, herding, k_center_greedy, select_per_class
from tests.conftest import examples


@st.composite
def point_sets(draw: st.DrawFn, most: int = 12) -> np.ndarray:
    """Draw a few points: on a small grid, with copies and ties, or from a normal distribution."""
    rows, dims = draw(st.integers(1, most)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        cells = draw(st.lists(st.integers(-2, 2), min_size=rows * dims, max_size=rows * dims))
        return np.array(cells, dtype=float).reshape(rows, dims)
    return np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=(rows, dims)) + 3


def distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(((x - y) ** 2).sum()))


def cover(points: np.ndarray, chosen: tuple[int, ...] | list[int]) -> float:
    """Compute the largest distance of a point to its nearest chosen one."""
    return max(min(distance(point, points[row]) for row in chosen) for point in points)


def slow_herding(points: np.ndarray, count: int) -> list[set[int]]:
    """List the rows that may be taken at each step after the first of each earlier list; several if tied."""
    mean, chosen, allowed = points.mean(axis=0), [], []
    for step in range(1, min(count, len(points)) + 1):
        costs = {}
        for row in set(range(len(points))) - set(chosen):
            costs[row] = distance((points[chosen].sum(axis=0) + points[row]) / step, mean)
        least = min(costs.values())
        allowed.append({row for row, cost in costs.items() if cost <= least + 1e-9})
        chosen.append(min(allowed[-1]))
    return allowed


@examples(200)
@given(points=point_sets(), count=st.integers(1, 13))
def test_each_herded_row_brings_the_mean_as_close_as_possible(points: np.ndarray, count: int) -> None:
    chosen = herding(torch.from_numpy(points), count)
    assert len(set(chosen)) == len(chosen) == min(count, len(points))
    mean = points.mean(axis=0)
    for step in range(1, len(chosen) + 1):
        before = points[chosen[: step - 1]].sum(axis=0)
        others = set(range(len(points))) - set(chosen[: step - 1])
        reached = distance((before + points[chosen[step - 1]]) / step, mean)
        assert reached <= min(distance((before + points[row]) / step, mean) for row in others) + 1e-9


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 20))
def test_herding_equals_a_double_loop_without_ties(seed: int, rows: int) -> None:
    points = np.random.default_rng(seed).normal(size=(rows, 4))
    steps = slow_herding(points, rows)
    if all(len(step) == 1 for step in steps):
        assert herding(torch.from_numpy(points), rows) == [min(step) for step in steps]


@given(points=point_sets(most=40))
def test_the_mean_of_herded_rows_converges(points: np.ndarray) -> None:
    mean = points.mean(axis=0)
    farthest = max(distance(point, mean) for point in points)
    chosen = herding(torch.from_numpy(points), len(points))
    for k in range(1, len(points) + 1):
        assert distance(points[chosen[:k]].mean(axis=0), mean) <= farthest / k**0.5 + 1e-9
    assert distance(points[chosen].mean(axis=0), mean) < 1e-9


def test_herded_rows_have_a_better_mean_than_random_ones() -> None:
    points = np.random.default_rng(0).normal(size=(400, 5))
    herded = distance(points[herding(torch.from_numpy(points), 20)].mean(axis=0), points.mean(axis=0))
    drawn = [np.random.default_rng(seed).choice(400, 20, replace=False) for seed in range(50)]
    assert herded < 0.2 * min(distance(points[rows].mean(axis=0), points.mean(axis=0)) for rows in drawn)


def slow_k_center(points: np.ndarray, count: int) -> list[int]:
    to_mean = [distance(point, points.mean(axis=0)) for point in points]
    chosen = [to_mean.index(min(to_mean))]
    while len(chosen) < min(count, len(points)):
        others = [row for row in range(len(points)) if row not in chosen]
        nearest = {row: min(distance(points[row], points[c]) for c in chosen) for row in others}
        chosen.append(max(others, key=lambda row: nearest[row]))
    return chosen


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 20), count=st.integers(1, 21))
def test_k_center_equals_a_double_loop(seed: int, rows: int, count: int) -> None:
    points = np.random.default_rng(seed).normal(size=(rows, 4))
    assert k_center_greedy(torch.from_numpy(points), count) == slow_k_center(points, count)


@examples(200)
@given(points=point_sets(most=9), count=st.integers(1, 5))
def test_k_center_covers_within_twice_the_optimum(points: np.ndarray, count: int) -> None:
    chosen = k_center_greedy(torch.from_numpy(points), count)
    assert len(set(chosen)) == len(chosen) == min(count, len(points))
    best = min(cover(points, subset) for subset in combinations(range(len(points)), len(chosen)))
    assert cover(points, chosen) <= 2 * best + 1e-9


@pytest.mark.parametrize("select", CORESETS.values(), ids=list(CORESETS))
def test_fewer_rows_are_the_first_of_more(select) -> None:
    points = torch.from_numpy(np.random.default_rng(1).normal(size=(30, 3)))
    many = select(points, 30)
    assert sorted(many) == list(range(30))
    assert all(select(points, count) == many[:count] for count in range(31))
    assert select(points, 99) == many


@pytest.mark.parametrize("select", CORESETS.values(), ids=list(CORESETS))
def test_selections_are_invariant_to_translation(select) -> None:
    """Hidden states are far from the origin and in single precision. The points used here are exact."""
    near = torch.from_numpy(np.random.default_rng(2).normal(size=(60, 3)) * 256).round().float() / 256
    assert select(near + 2048, 12) == select(near, 12) == select(near.double(), 12)


@pytest.mark.parametrize("select", CORESETS.values(), ids=list(CORESETS))
def test_classes_are_selected_independently(select) -> None:
    points = torch.from_numpy(np.random.default_rng(3).normal(size=(12, 2)))
    labels = [7, 2] * 5 + [2, 2]
    found = select_per_class(select, points, labels, 6)
    assert list(found) == [2, 7]
    for label, rows in found.items():
        own = [row for row, other in enumerate(labels) if other == label]
        assert rows == [own[i] for i in select(points[own], 6)]
    assert len(found[2]) == 6
    assert sorted(found[7]) == [0, 2, 4, 6, 8]
