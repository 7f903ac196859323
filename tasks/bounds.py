"""The theory's bounds beside what all arms' runs came to, in one table."""

from __future__ import annotations

import pandas as pd

from gradmm_core.artifacts import StageArtifact
from gradmm_core.gradient_bounds import HELD, bounds_over_seeds
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("bounds")
def bounds(context: RunContext, paths: list[StageArtifact]) -> Outcome:
    """One row per arm and step."""
    table = bounds_over_seeds(pd.concat([each.read() for each in paths], ignore_index=True))
    counts = {name: int(table[name].sum()) for name in ("runs", *HELD)}
    return table, {"arms": int(table["arm"].nunique()), **counts}
