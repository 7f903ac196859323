"""Errors of the gradients of each arm's texts along fine-tuning, over seeds."""

from __future__ import annotations

import pandas as pd

from gradmm.studies.arms import PRODUCT
from gradmm.studies.compare import LEAD, lead_figures, seed_figures

#: Columns of the stage `gradients` that have a mean and the half width of an interval.
MEASURES = ("error", "cosine", "real_loss", "arm_loss")


def gradients_over_seeds(path: pd.DataFrame) -> pd.DataFrame:
    """Tabulate one row per arm, step and part, in the order of `path`, with the columns of the stage `gradients`.

    `difference` is the product's error minus the arm's, paired by seed: a negative one means that the product is
    nearer to the real gradient. It is null for the product itself, and where a run of either has diverged.

    Args:
        path: rows of `gradient_path` of all arms and seeds, with one schedule.
    """
    table = []
    by_seed = {key: runs.set_index("seed") for key, runs in path.groupby(["arm", "step", "part"], sort=False)}
    for (arm, step, part), runs in by_seed.items():
        row = {"arm": arm, "step": step, "part": part, "runs": len(runs), "texts": runs["texts"].mean()}
        for measure in MEASURES:
            row |= seed_figures(measure, runs[measure].tolist())
        product = by_seed[PRODUCT, step, part]["error"].loc[runs.index]
        lead = lead_figures(product.tolist(), runs["error"].tolist())
        table.append(row | (dict.fromkeys(LEAD) if arm == PRODUCT else lead))
    return pd.DataFrame(table)
