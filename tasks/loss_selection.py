"""Keep the texts of each class that match the target best."""

from __future__ import annotations

from statistics import fmean

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

    For head gradients, the figures include the mean loss of the classes' sets before and after the selection.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.filters.loss_selection import select_by_loss
    from gradmm.filters.subset_selection import TargetSet, target_set
    from gradmm.target.matched_target import matched_target

    candidates = kept_texts(texts.read())
    if matching.matching != "head":
        ranked = select_by_loss(candidates, settings, probe_weight)
        return ranked, filter_figures(ranked)
    language_model, template = read_model(context, model, prompt_template)
    sets: dict[int, TargetSet] = {}
    for label in candidates["label"].unique().tolist():
        matched, where, _ = matched_target(
            target, space, template, matching, label, records[label], clipping_norm, language_model.device
        )
        tokens = token_lists(candidates[candidates["label"] == label])
        sets[label] = target_set(
            language_model, template, tokens, label, matched, where, loss, matching.batch_size
        )
    ranked = select_by_loss(candidates, settings, probe_weight, sets)
    figures = filter_figures(ranked)
    kept_ids = set(ranked[ranked["kept"]]["id"])
    kept = candidates["id"].isin(kept_ids)
    figures["set_matching_loss_before"] = fmean(each.loss(range(len(each.products))) for each in sets.values())
    figures["set_matching_loss"] = fmean(
        sets[label].loss([place for place, stays in enumerate(kept[candidates["label"] == label]) if stays])
        for label in sets
    )
    return ranked, figures
