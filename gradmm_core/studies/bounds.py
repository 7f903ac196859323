"""The lemma and the theorem of `gradient_path`, compared with the observed gaps, over seeds."""

from __future__ import annotations

import pandas as pd

from gradmm.studies.compare import seed_figures

#: Relative tolerance of a bound: gradients are float32, and both sides may be the same number.
ROUNDING = 1e-5

RUN = ["arm", "seed", "learning_rate", "steps"]

#: Columns of the stage `bounds` that have a mean and the half width of an interval.
MEASURES = (
    "start_gap",
    "drift",
    "real_smoothness",
    "arm_smoothness",
    "gap_smoothness",
    "gap",
    "gap_bound",
    "sharp_gap_bound",
    "loss_difference",
    "loss_bound",
    "sharp_loss_bound",
)

#: Whether the observation is within the bound; over seeds, the number of runs where it is.
HELD = ("gap_held", "sharp_gap_held", "loss_held", "sharp_loss_held")


def bounds_of_runs(path: pd.DataFrame) -> pd.DataFrame:
    """Compute bounds and observations at every step above zero of every run.

    Args:
        path: rows of `gradient_path`, of any number of runs.

    Returns:
        Columns `RUN`, `step`, `MEASURES`, and `HELD` as truth values:
            start_gap: e_0                      gap, gap_bound: e_t and e_0 + b D_t
            drift: D_t                          loss_difference: |(L(th_t) - L(th_0)) - (S(th_t) - S(th_0))|
            *_smoothness: of L, S and L - S     loss_bound: e_0 D_t + b D_t^2 / 2
        with b the sum of the smoothness of L and of S; in the columns `sharp_*`, the smoothness of L - S. After a
        divergence no bound holds.
    """
    rows = path[path["part"] == "all"]
    start = rows[rows["step"] == 0].assign(start_difference=rows["real_loss"] - rows["arm_loss"])
    start = start.rename(columns={"gap": "start_gap"})[[*RUN, "start_gap", "start_difference"]]
    after = rows[rows["step"] > 0].merge(start, on=RUN, validate="many_to_one")
    after["loss_difference"] = (after["real_loss"] - after["arm_loss"] - after["start_difference"]).abs()
    both = after["real_smoothness"] + after["arm_smoothness"]
    for sharp, smoothness in (("", both), ("sharp_", after["gap_smoothness"])):
        start_gap, drift = after["start_gap"], after["drift"]
        after[f"{sharp}gap_bound"] = start_gap + smoothness * drift
        after[f"{sharp}loss_bound"] = start_gap * drift + smoothness * drift**2 / 2
        for name, observed in (("gap", after["gap"]), ("loss", after["loss_difference"])):
            after[f"{sharp}{name}_held"] = observed <= after[f"{sharp}{name}_bound"] * (1 + ROUNDING)
    return after[[*RUN, "step", *MEASURES, *HELD]]


def bounds_over_seeds(path: pd.DataFrame) -> pd.DataFrame:
    """Tabulate one row per arm and step above zero, in the order of `path`: the rows of the stage `bounds`."""
    table = []
    for (arm, step), runs in bounds_of_runs(path).groupby(["arm", "step"], sort=False):  # pyright: ignore
        row = {"arm": arm, "step": step, "runs": len(runs)}
        for measure in MEASURES:
            row |= seed_figures(measure, runs[measure].tolist())
        table.append(row | {held: int(runs[held].sum()) for held in HELD})
    return pd.DataFrame(table)
