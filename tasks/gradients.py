"""How far the gradients of all arms are from real ones, in one table."""

from __future__ import annotations

import pandas as pd

from gradmm_core.artifacts import StageArtifact
from gradmm_core.gradient_table import gradients_over_seeds
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("gradients")
def gradients(context: RunContext, paths: list[StageArtifact]) -> Outcome:
    """One row per arm, step and part of the parameters."""
    table = gradients_over_seeds(pd.concat([each.read() for each in paths], ignore_index=True))
    return table, {"arms": int(table["arm"].nunique())}
