"""What texts made for one model are worth to others, in one table."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("transfer")
def transfer(context: RunContext, models: list[str], evaluations: list[list[StageArtifact]]) -> Outcome:
    """One row per model and arm.

    Args:
        evaluations: for each of `models`, those of all arms and seeds.
    """
    import pandas as pd  # late, see tasks/stage.py

    from gradmm_core.compare import compare_arms

    parts = [
        compare_arms(pd.concat([one.read() for one in of_model], ignore_index=True), None).assign(model=model)
        for model, of_model in zip(models, evaluations, strict=True)
    ]
    return pd.concat(parts, ignore_index=True), {}
