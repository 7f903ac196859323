"""How far the gradients of each arm's texts are from those of real ones along fine-tuning, over seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gradmm_core.arms import PRODUCT
from gradmm_core.intervals import mean_over_seeds, paired_difference

#: Columns of the stage `gradients` that have a mean and half of an interval.
MEASURES = ("error", "cosine", "real_loss", "arm_loss")


def gradients_over_seeds(path: pd.DataFrame) -> pd.DataFrame:
    """One row per arm, step and part, in the order of `path`, with the columns of the stage `gradients`.

    `difference` is the product's error minus the arm's, paired by seed: below zero the product is nearer to the
    real gradient. It is null for the product itself, and where a run of either has diverged.

    Args:
        path: rows of `gradient_path` of all arms and seeds, at one learning rate.
    """
    rows = []
    groups = ["arm", "step", "part"]
    by_seed = {key: of_key.set_index("seed") for key, of_key in path.groupby(groups, sort=False)}
    for (arm, step, part), runs in by_seed.items():
        row = {"arm": arm, "step": step, "part": part, "runs": len(runs), "texts": runs["texts"].mean()}
        for measure in MEASURES:
            row |= seed_figures(measure, runs[measure].tolist())
        product = by_seed[PRODUCT, step, part]["error"].loc[runs.index]
        compared = arm != PRODUCT and np.isfinite([*product, *runs["error"]]).all()
        ahead = paired_difference(product.tolist(), runs["error"].tolist()) if compared else None
        row["difference"] = ahead.mean if ahead else None
        row["difference_half_width"] = ahead.half_width if ahead else None
        row["verdict"] = ahead.verdict if ahead else None
        rows.append(row)
    return pd.DataFrame(rows)


def seed_figures(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The mean over seeds, by its name, and half of its interval; neither, if a run has diverged."""
    if not np.isfinite(values).all():
        return {name: None, f"{name}_half_width": None}
    over_seeds = mean_over_seeds(values)
    return {name: over_seeds.mean, f"{name}_half_width": over_seeds.half_width}
