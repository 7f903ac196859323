"""Tables over seeds compared with plain NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from gradmm.studies.arms import PRODUCT
from gradmm.studies.bounds import bounds_of_runs, bounds_over_seeds
from gradmm.studies.gradient_path import SMOOTHNESS
from gradmm.studies.gradients import gradients_over_seeds

ARMS, SEEDS, STEPS = ("random", "zero-shot", PRODUCT), (3, 1, 2), (0, 10, 20)


@pytest.fixture
def path() -> pd.DataFrame:
    """Rows of `gradient_path` with random figures."""
    generator = np.random.default_rng(0)
    figures = ["gap", "error", "cosine", "real_loss", "arm_loss", "drift", *SMOOTHNESS]
    return pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "learning_rate": 1e-4, "steps": 9, "step": step, "part": part, "texts": 10}
            | {figure: generator.uniform(0.5, 1.5) for figure in figures}
            for arm in ARMS
            for seed in generator.permutation(SEEDS)  # in any order
            for step in STEPS
            for part in ("head", "all")
        ]
    )


def values(path: pd.DataFrame, arm: str, step: int, part: str, figure: str) -> np.ndarray:
    own = path[(path["arm"] == arm) & (path["step"] == step) & (path["part"] == part)]
    return own.set_index("seed")[figure].loc[list(SEEDS)].to_numpy()


def test_gradients_are_means_over_seeds_and_paired_differences(path: pd.DataFrame) -> None:
    table = gradients_over_seeds(path)
    keys = [(arm, step, part) for arm in ARMS for step in STEPS for part in ("head", "all")]
    assert [*zip(table["arm"], table["step"], table["part"], strict=True)] == keys
    t = stats.t.ppf(0.975, 2)
    for row in table.to_dict("records"):
        key = row["arm"], row["step"], row["part"]
        for figure in ("error", "cosine", "real_loss", "arm_loss"):
            own = values(path, *key, figure)
            assert row[figure] == pytest.approx(own.mean())
            assert row[f"{figure}_half_width"] == pytest.approx(t * own.std(ddof=1) / np.sqrt(3))
        if row["arm"] == PRODUCT:
            assert pd.isna(row["difference"])
            assert pd.isna(row["verdict"])
        else:
            ahead = values(path, PRODUCT, *key[1:], "error") - values(path, *key, "error")
            assert row["difference"] == pytest.approx(ahead.mean())
            half = t * ahead.std(ddof=1) / np.sqrt(3)
            assert row["difference_half_width"] == pytest.approx(half)
            assert (row["verdict"] == "within noise") == (abs(ahead.mean()) <= half)


def test_bounds_are_means_over_seeds_of_those_of_runs(path: pd.DataFrame) -> None:
    table, of_runs = bounds_over_seeds(path), bounds_of_runs(path)
    assert [*zip(table["arm"], table["step"], strict=True)] == [(arm, step) for arm in ARMS for step in STEPS[1:]]
    for row in table.to_dict("records"):
        start, drift, gap = (values(path, row["arm"], step, "all", figure) for step, figure in
                             ((0, "gap"), (row["step"], "drift"), (row["step"], "gap")))  # fmt: skip
        real, arm, both = (values(path, row["arm"], row["step"], "all", name) for name in SMOOTHNESS)
        change = sum(
            sign * values(path, row["arm"], step, "all", f"{loss}_loss")
            for loss, step, sign in (
                ("real", row["step"], 1),
                ("real", 0, -1),
                ("arm", row["step"], -1),
                ("arm", 0, 1),
            )
        )
        change = np.abs(change)
        for name, each in {"start_gap": start, "drift": drift, "gap": gap, "loss_difference": change}.items():
            assert row[name] == pytest.approx(each.mean()), name
        for sharp, b in (("", real + arm), ("sharp_", both)):
            gap_bound, loss_bound = start + b * drift, drift * (start + b * drift / 2)
            assert row[f"{sharp}gap_bound"] == pytest.approx(gap_bound.mean())
            assert row[f"{sharp}loss_bound"] == pytest.approx(loss_bound.mean())
            assert row[f"{sharp}gap_held"] == (gap <= gap_bound).sum()
            assert row[f"{sharp}loss_held"] == (change <= loss_bound).sum()
        assert row["runs"] == 3
    assert len(of_runs) == 3 * len(table)


def test_an_arm_with_a_diverged_run_has_no_mean_there(path: pd.DataFrame) -> None:
    lost = (path["arm"] == PRODUCT) & (path["seed"] == 1) & (path["step"] == 20)
    path.loc[lost, ["error", "gap", "real_loss"]] = np.nan
    gradients = gradients_over_seeds(path).set_index(["arm", "step", "part"])
    error, difference = gradients["error"].to_dict(), gradients["difference"].to_dict()
    assert pd.isna(error[PRODUCT, 20, "all"])
    assert pd.isna(difference["random", 20, "all"])
    assert error["random", 20, "all"] > 0
    assert pd.notna(difference["random", 10, "all"])
    bounds = bounds_over_seeds(path).set_index(["arm", "step"])
    assert pd.isna(bounds["gap"].to_dict()[PRODUCT, 20])
    assert bounds["gap_held"].to_dict()[PRODUCT, 20] <= 2
