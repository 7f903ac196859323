"""Drop duplicates, and keep the texts of each class that match the target best."""

from __future__ import annotations

from gradmm.config.settings import LossSelectionSettings, MatchingLoss, TargetGradientSettings
from gradmm.filters.rows import filter_figures, kept_texts
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("loss_selection")
def loss_selection(
    context: RunContext,
    texts: StageArtifact,
    target: StageArtifact,
    space: StageArtifact | None,
    model: ModelReference,
    prompt_template: PromptTemplate,
    records: dict[int, float | None],
    clipping_norm: float,
    matching: TargetGradientSettings,
    loss: MatchingLoss,
    probe_weight: float,
    settings: LossSelectionSettings,
) -> Outcome:
    """Drop duplicates, then keep the texts with the lowest losses, or a set with a low joint loss.

    For head gradients, the figures include the mean loss of the classes' sets before and after the selection. Only
    `by="set"` needs memory that grows with the square of the number of texts.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.filters.loss_selection import select_by_loss, select_texts

    candidates = kept_texts(texts.read())
    if matching.matching != "head":
        ranked = select_by_loss(candidates, settings, probe_weight)
        return ranked, filter_figures(ranked)
    language_model, template = read_model(context, model, prompt_template)
    return select_texts(
        language_model,
        template,
        candidates,
        target,
        space,
        records,
        clipping_norm,
        matching,
        loss,
        probe_weight,
        settings,
    )
