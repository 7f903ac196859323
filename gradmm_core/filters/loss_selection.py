"""Keep the texts of each class with the lowest matching loss and probe loss."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from gradmm.config.settings import LossSelectionSettings, MatchingLoss, TargetGradientSettings
from gradmm.filters.rows import filter_figures, token_lists
from gradmm.filters.subset_selection import TargetSet, set_losses, target_set
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate
from gradmm.metrics.diversity import near_duplicates
from gradmm.storage.artifacts import StageOutput
from gradmm.target.matched_target import matched_target


def select_texts(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    candidates: pd.DataFrame,
    target: StageOutput,
    space: StageOutput | None,
    records: Mapping[int, float | None],
    clipping_norm: float,
    matching: TargetGradientSettings,
    loss: MatchingLoss,
    probe_weight: float,
    settings: LossSelectionSettings,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Select texts by their head gradients: the rows and figures of the stage `loss_selection`.

    The figures include the mean loss of the classes' sets before and after the selection. Only `by="set"` needs
    memory that grows with the square of the number of texts.

    Args:
        candidates: without the columns `kept` and `reason`.
        records: of each class, by label, see `matched_target`.
    """
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


def select_by_loss(
    texts: pd.DataFrame,
    settings: LossSelectionSettings,
    probe_weight: float = 0.0,
    sets: Mapping[int, TargetSet] | None = None,
) -> pd.DataFrame:
    """Add the columns `rank` (within the class, 1 = lowest loss), `kept` and `reason` (GRADMM, section 4.3).

    The loss is the matching loss plus, with a probe, `probe_weight` times the probe's loss. Duplicates of a better
    text are dropped first: exact ones, up to case and white space, and near ones. Equal losses are ranked by id,
    so that the choice does not depend on the order of rows. Texts without a matching loss are all ranked by id.

    Args:
        sets: by label, for `by="set"`; each has a row for each text of the class, in the order of `texts`.
    """
    places = texts.groupby("label").cumcount()
    losses = texts["matching_loss"] + probe_weight * texts["probe_loss"].fillna(0.0)
    ordered = texts.assign(place=places, loss=losses).sort_values(["label", "loss", "id"], ignore_index=True)
    duplicate = _repeats(ordered, settings.near_duplicate)
    rank = ordered.groupby("label").cumcount() + 1
    most = settings.per_class or len(texts)
    if settings.by == "set":
        assert sets is not None
        kept = pd.Series(False, index=ordered.index)
        for label, of_class in ordered[~duplicate].groupby("label"):
            chosen = sets[int(str(label))].choose(most, among=of_class["place"].tolist())
            kept[of_class.index[of_class["place"].isin(chosen)]] = True
        why = "the set matches better without it"
    else:
        unique_rank = (~duplicate).groupby(ordered["label"]).cumsum()
        kept = ~duplicate & (unique_rank <= most)
        written = ordered["matching_loss"].isna().all()
        why = "more texts than loss_selection.per_class" if written else "higher loss than the texts kept"
    reason = pd.Series("", index=ordered.index)
    reason[~kept] = why
    reason[duplicate] = "duplicate"
    return ordered.drop(columns=["place", "loss"]).assign(rank=rank, kept=kept, reason=reason)


def _repeats(ordered: pd.DataFrame, share: float) -> pd.Series:
    """Flag texts that duplicate, or nearly duplicate, a better text of their class."""
    spelling = ordered["text"].str.casefold().str.split().str.join(" ")
    exact = pd.DataFrame({"label": ordered["label"], "spelling": spelling}).duplicated()
    near = spelling.groupby(ordered["label"]).transform(lambda of_class: near_duplicates(of_class.tolist(), share))
    return exact | near.astype(bool)
