"""Measure whether the texts repeat private records. For the private report only."""

from __future__ import annotations

from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task


@stage_task("memorisation")
def memorisation(
    context: RunContext,
    texts: StageArtifact,
    members: SplitReference,
    non_members: SplitReference,
    rows_per_unit: int | None,
    seed: int,
) -> Outcome:
    """Compare every text with train rows (members), and with validation rows (non-members) as the baseline.

    Members are the train rows that the target was computed from, at most `rows_per_unit` of a unit.
    """
    from gradmm.audits.memorisation import compare_texts  # imported here: see tasks/runtime/stage_task.py

    own, others = read_split(context, members).used(rows_per_unit), read_split(context, non_members)
    return compare_texts(texts.read(), own.texts, others.texts, seed)
