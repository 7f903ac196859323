"""Accuracy of each arm of a comparison, beside the product's.

Everything is paired by seed: within a seed, all arms are fine-tuned on batches in the same order and evaluated on
the same rows. A seed stands for another generation of all texts or another draw of random rows, and for another
fine-tuning. Intervals are at 95%: Student's over seeds, and bootstrap intervals over test rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from gradmm.evaluation.arm import ALL_ROWS
from gradmm.evaluation.finetune_eval import accuracies_by_seed, chosen_schedule, correct_by_seed
from gradmm.metrics.intervals import interval_over_rows, mean_over_seeds, paired_difference
from gradmm.studies.arms import PRODUCT, counterpart

#: Columns of `arm_measures`, with their headings and digits.
MEASURES = {
    "log_perplexity": ("log-perplexity", 2),
    "distinct_2": ("distinct-2", 3),
    "self_bleu": ("self-BLEU", 3),
    "frechet_distance": ("Fréchet distance", 1),
    "squared_mmd": ("squared MMD", 4),
    "nearest_distance": ("nearest real text", 2),
}

#: A smaller gap between the ceiling and the model before fine-tuning vanishes in the rounding of the tables.
MIN_GAP = 0.0005

#: Columns of `lead_figures`.
LEAD = ("difference", "difference_half_width", "verdict")


def compare_arms(evaluations: pd.DataFrame, measures: pd.DataFrame | None = None) -> pd.DataFrame:
    """Tabulate one row per arm and size, in the order of `evaluations`.

    The columns are those of the stage `compare` without `gap_recovered`; see `with_gap_recovered`.

    `difference` is the product's accuracy minus the arm's, each of the checkpoint chosen on validation. A rival is
    compared with the product under the same guarantee, in the column `against`. An arm at a size that the product
    does not have (`before`, `real-1k`, `all rows`, ...) is compared with the product's largest size.

    Args:
        evaluations: rows of `arm_eval`, of all arms, sizes and seeds.
        measures: rows of `arm_measures`; without them their columns are left out.

    Raises:
        KeyError: if an arm lacks one of the product's seeds, or a rival the product under its guarantee.
    """
    groups = {
        (str(arm), int(str(size))): rows
        for (arm, size), rows in evaluations.groupby(["arm", "size"], sort=False)  # pyright: ignore
    }
    by_seed = {key: accuracies_by_seed(rows).set_index("seed") for key, rows in groups.items()}
    correct = {key: correct_by_seed(rows) for key, rows in groups.items()}
    product_sizes = [size for arm, size in groups if arm == PRODUCT]
    table = []
    for (arm, size), rows in groups.items():
        values = by_seed[arm, size]
        against = counterpart(arm), size if size in product_sizes else max(product_sizes)
        row = {
            "arm": arm,
            "size": size,
            "texts": rows.drop_duplicates("seed")["texts"].mean(),
            "seeds": len(values),
            **chosen_schedule(rows)._asdict(),
        }
        for figure in ("accuracy", "best_on_test"):
            row |= seed_figures(figure, values[figure].tolist())
        row |= rows_figures("accuracy", correct[arm, size].mean(), row["accuracy"])
        if measures is not None:
            of_arm = (measures["arm"] == arm) & (measures["size"] == size)
            row |= {measure: measures.loc[of_arm, measure].mean() for measure in MEASURES}
        row["against"], row["against_size"] = against
        if arm == PRODUCT:
            row |= dict.fromkeys(LEAD)
        else:
            product = by_seed[against]["accuracy"]
            # No seed changes the model before fine-tuning.
            seeds = product.index if size else [*values.index] * len(product)
            row |= lead_figures(product.tolist(), values["accuracy"].loc[seeds].tolist())
            gains = correct[against].mean() - correct[arm, size].loc[seeds].mean()
            row |= rows_figures("difference", gains, row["difference"])
        table.append(row)
    return pd.DataFrame(table)


def with_gap_recovered(table: pd.DataFrame) -> pd.DataFrame:
    """Add the column `gap_recovered`: the share of the gap from the model before fine-tuning to all train rows.

        gap_recovered = (accuracy - accuracy before) / (accuracy of all rows - accuracy before)

    It is null without either arm, and where the ceiling does not exceed the model by more than `MIN_GAP`.

    Args:
        table: result of `compare_arms`.
    """
    accuracy = table["accuracy"].astype(float)
    before, ceiling = (accuracy[table["arm"] == arm].mean() for arm in ("before", ALL_ROWS))
    if not ceiling - before > MIN_GAP:  # also if one is NaN
        return table.assign(gap_recovered=np.nan)
    return table.assign(gap_recovered=(accuracy - before) / (ceiling - before))


def seed_figures(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Columns `name` and `<name>_half_width`: the mean over seeds and its interval. Null if a run has diverged."""
    if not np.isfinite(values).all():
        return {name: None, f"{name}_half_width": None}
    over_seeds = mean_over_seeds(values)
    return {name: over_seeds.mean, f"{name}_half_width": over_seeds.half_width}


def rows_figures(name: str, values: pd.Series, mean: float | None) -> dict[str, float]:
    """Columns `<name>_rows_low` and `<name>_rows_high`: the interval over test rows of the mean of `values`.

    NaN for a single row, and if there is no mean over seeds because a run has diverged.
    """
    low, high = (math.nan, math.nan) if mean is None else interval_over_rows(values.to_numpy(dtype=float))
    return {f"{name}_rows_low": low, f"{name}_rows_high": high}


def lead_figures(product: Sequence[float], other: Sequence[float]) -> dict[str, float | str | None]:
    """Columns `LEAD` of product - other, paired by seed. Null if a run has diverged."""
    if not np.isfinite([*product, *other]).all():
        return dict.fromkeys(LEAD)
    lead = paired_difference(product, other)
    return dict(zip(LEAD, (lead.mean, lead.half_width, lead.verdict), strict=True))
