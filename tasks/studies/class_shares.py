"""Soft labels of a rival's texts, weighted by the classes' shares of the records."""

from __future__ import annotations

from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("class_shares")
def class_shares(
    context: RunContext, texts: StageArtifact, release: StageArtifact, class_names: dict[int, str]
) -> Outcome:
    """Multiply the texts' class probabilities by the shares that a rival's release counts.

    Args:
        texts: of the stage `labelling`, by the calibrated model.
        release: of the stage `private_votes` or `private_means`.
    """
    from gradmm.rivals.class_shares import with_class_shares  # imported here: see tasks/runtime/stage_task.py
    from gradmm.rivals.releases import read_records

    return with_class_shares(texts.read(), *read_records(release.figures), class_names)
