"""Keeps, of each class, the texts whose gradients match the target best and that the probe is surest of."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from gradmm_core.settings import LossSelectionSettings
from gradmm_core.target_set import TargetSet
from gradmm_core.variety import near_duplicates


def select_by_loss(
    texts: pd.DataFrame,
    settings: LossSelectionSettings,
    probe_weight: float = 0.0,
    sets: Mapping[int, TargetSet] | None = None,
) -> pd.DataFrame:
    """Adds `rank` (within the class, 1 = lowest loss), `kept` and `reason` (GRADMM, section 4.3).

    The loss is the matching loss and, where there is a probe, `probe_weight` times the probe's.
    Texts that repeat a better one are dropped first: exact duplicates, but for case and blanks, and near ones.
    Equal losses are ranked by id, so that the choice does not depend on the rows' order.

    Args:
        sets: for `by="set"`, of each class, with a row for each of its texts in the order of `texts`.
    """
    places = texts.groupby("label").cumcount()
    losses = texts["matching_loss"] + probe_weight * texts["probe_loss"].fillna(0.0)
    ordered = texts.assign(place=places, loss=losses).sort_values(["label", "loss", "id"], ignore_index=True)
    duplicate = _repeats(ordered, settings.near_duplicate)
    rank = ordered.groupby("label").cumcount() + 1
    if settings.by == "set":
        assert sets is not None
        kept = pd.Series(False, index=ordered.index)
        for label, of_class in ordered[~duplicate].groupby("label"):
            chosen = sets[int(str(label))].choose(settings.per_class, among=of_class["place"].tolist())
            kept[of_class.index[of_class["place"].isin(chosen)]] = True
        why = "the set matches better without it"
    else:
        unique_rank = (~duplicate).groupby(ordered["label"]).cumsum()
        kept = ~duplicate & (unique_rank <= settings.per_class)
        why = "higher loss than the texts kept"
    reason = pd.Series("", index=ordered.index)
    reason[~kept] = why
    reason[duplicate] = "duplicate"
    return ordered.drop(columns=["place", "loss"]).assign(rank=rank, kept=kept, reason=reason)


def _repeats(ordered: pd.DataFrame, share: float) -> pd.Series:
    """Which texts are the same as a better one of their class, or nearly."""
    spelling = ordered["text"].str.casefold().str.split().str.join(" ")
    exact = pd.DataFrame({"label": ordered["label"], "spelling": spelling}).duplicated()
    near = spelling.groupby(ordered["label"]).transform(lambda of_class: near_duplicates(of_class.tolist(), share))
    return exact | near.astype(bool)
