"""What texts made from few real rows are worth beside these rows, in one table."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("scarce")
def scarce(context: RunContext, few: list[int], evaluations: list[list[StageArtifact]]) -> Outcome:
    """One row per arm and number of real rows, which is the column `size`.

    Args:
        evaluations: for each entry of `few`, those of all arms and seeds.
    """
    import pandas as pd  # late, see tasks/stage.py

    from gradmm_core.compare import compare_arms

    rows = [one.read().assign(size=n) for n, of_n in zip(few, evaluations, strict=True) for one in of_n]
    return compare_arms(pd.concat(rows, ignore_index=True), None), {}
