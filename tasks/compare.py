"""All arms of a comparison in one table."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("compare")
def compare(context: RunContext, evaluations: list[StageArtifact], measures: list[StageArtifact]) -> Outcome:
    """One row per arm and size."""
    import pandas as pd  # late, see tasks/stage.py

    from gradmm_core.compare import compare_arms

    tables = [pd.concat([each.read() for each in part], ignore_index=True) for part in (evaluations, measures)]
    table = compare_arms(*tables)
    verdicts = table["verdict"].dropna().value_counts()
    return table, {"arms": int(table["arm"].nunique()), "verdicts": {str(k): int(n) for k, n in verdicts.items()}}
