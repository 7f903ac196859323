"""Measure whether the texts repeat private records. For the private report only."""

from __future__ import annotations

from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task


@stage_task("memorisation")
def memorisation(
    context: RunContext, texts: StageArtifact, members: SplitReference, non_members: SplitReference, seed: int
) -> Outcome:
    """Compare every text with the train rows (members) and with validation rows (non-members) as the baseline."""
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.audits.memorisation import memorisation as measure
    from gradmm.audits.memorisation import summarise

    synthetic = texts.read()
    frame = measure(
        synthetic["text"].tolist(),
        read_split(context, members).texts,
        read_split(context, non_members).texts,
        seed,
    )
    frame.insert(0, "id", synthetic["id"].tolist())
    return frame, summarise(frame)
