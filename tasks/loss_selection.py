"""Stage 4: keep the texts of each class that match best."""

from __future__ import annotations

from statistics import fmean

from gradmm_core.artifacts import StageArtifact
from gradmm_core.filters import filter_figures, kept_texts, token_lists
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import LossSelectionSettings, MatchingLoss, TargetGradientSettings
from gradmm_core.wording import ResponseTemplate
from tasks.inputs import read_model
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("loss_selection")
def loss_selection(
    context: RunContext,
    texts: StageArtifact,
    target: StageArtifact,
    space: StageArtifact | None,
    model: ModelReference,
    wording: ResponseTemplate,
    records: dict[int, float | None],
    clipping_norm: float,
    matching: TargetGradientSettings,
    loss: MatchingLoss,
    probe_weight: float,
    settings: LossSelectionSettings,
) -> Outcome:
    """Drops duplicates, then keeps the lowest losses, or the set that matches best.

    The figures give the matching loss of the whole set, before and after, where it has a closed form.
    """
    # Late, see tasks/stage.py.
    from gradmm_core.loss_selection import select_by_loss
    from gradmm_core.target_set import TargetSet, target_set
    from tasks.matched_target import matched_target

    candidates = kept_texts(texts.read())
    if matching.matching != "head":
        ranked = select_by_loss(candidates, settings, probe_weight)
        return ranked, filter_figures(ranked, "loss_selection")
    language_model, template = read_model(context, model, wording)
    sets: dict[int, TargetSet] = {}
    for label in candidates["label"].unique().tolist():
        matched, where, _ = matched_target(
            target, space, template, matching, label, records[label], clipping_norm, language_model.device
        )
        of_class = token_lists(candidates[candidates["label"] == label])
        sets[label] = target_set(
            language_model, template, of_class, label, matched, where, loss, matching.batch_size
        )
    ranked = select_by_loss(candidates, settings, probe_weight, sets)
    figures = filter_figures(ranked, "loss_selection")
    kept_ids = set(ranked[ranked["kept"]]["id"])
    kept = candidates["id"].isin(kept_ids)
    figures["set_matching_loss_before"] = fmean(each.loss(range(len(each.products))) for each in sets.values())
    figures["set_matching_loss"] = fmean(
        sets[label].loss([place for place, stays in enumerate(kept[candidates["label"] == label]) if stays])
        for label in sets
    )
    return ranked, figures
