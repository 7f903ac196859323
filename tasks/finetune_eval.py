"""Stage 6: what the synthetic texts are worth for fine-tuning, beside as many real ones."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("finetune_eval")
def finetune_eval(context: RunContext, shards: list[StageArtifact]) -> Outcome:
    """All fine-tunings together: rows of `arm_eval`, for the arms `before`, `synthetic` and `real`."""
    import pandas as pd  # late, see tasks/stage.py

    from gradmm_core.finetune_eval import COLUMNS, summarise

    frame = pd.concat([shard.read() for shard in shards], ignore_index=True)[COLUMNS]
    return frame, summarise(frame)
