"""Do the released texts repeat records behind the target gradient? For the private report only."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from gradmm_core.filters import kept_texts
from tasks.inputs import read_split
from tasks.stage import Outcome, RunContext, SplitReference, stage_task


@stage_task("memorisation")
def memorisation(
    context: RunContext, texts: StageArtifact, members: SplitReference, non_members: SplitReference, seed: int
) -> Outcome:
    """Every released text against the train rows, with validation rows for the yardstick."""
    # Late, see tasks/stage.py.
    from gradmm_core.memorisation import memorisation as measure
    from gradmm_core.memorisation import summarise

    kept = kept_texts(texts.read())
    frame = measure(
        kept["text"].tolist(),
        read_split(context, members).texts,
        read_split(context, non_members).texts,
        seed,
    )
    frame.insert(0, "id", kept["id"].tolist())
    return frame, summarise(frame)
