"""Drop duplicates, and keep the texts of each class that match the target best."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from gradmm.config.settings import LossSelectionSettings, MatchingLoss, TargetGradientSettings
from gradmm.filters.rows import filter_figures, kept_texts, token_lists
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
    from gradmm.filters.loss_selection import select_by_loss
    from gradmm.filters.subset_selection import set_losses, target_set
    from gradmm.target.matched_target import matched_target

    candidates = kept_texts(texts.read())
    if matching.matching != "head":
        ranked = select_by_loss(candidates, settings, probe_weight)
        return ranked, filter_figures(ranked)
    language_model, template = read_model(context, model, prompt_template)
    labels = candidates["label"].unique().tolist()

    def inputs(label: int) -> dict[str, Any]:
        matched, where, _ = matched_target(
            target, space, template, matching, label, records[label], clipping_norm, language_model.device
        )
        return {
            "language_model": language_model,
            "template": template,
            "texts": token_lists(candidates[candidates["label"] == label]),
            "label": label,
            "target": matched,
            "space": where,
            "kind": loss,
            "batch_size": matching.batch_size,
        }

    sets = {label: target_set(**inputs(label)) for label in labels} if settings.by == "set" else None
    ranked = select_by_loss(candidates, settings, probe_weight, sets)
    kept = candidates["id"].isin(ranked[ranked["kept"]]["id"])
    losses = [set_losses(**inputs(label), kept=kept[candidates["label"] == label].tolist()) for label in labels]
    before, after = zip(*losses, strict=True)
    figures = filter_figures(ranked)
    return ranked, figures | {"set_matching_loss_before": fmean(before), "set_matching_loss": fmean(after)}
