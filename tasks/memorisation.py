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
    from gradmm.audits.memorisation import compare_texts  # imported here: see tasks/runtime/stage_task.py

    of_members, of_non_members = read_split(context, members).texts, read_split(context, non_members).texts
    return compare_texts(texts.read(), of_members, of_non_members, seed)
