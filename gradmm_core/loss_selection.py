"""Keeps, of each class, the texts whose gradients match the target best."""

from __future__ import annotations

import pandas as pd

from gradmm_core.settings import LossSelectionSettings


def select_by_loss(texts: pd.DataFrame, settings: LossSelectionSettings) -> pd.DataFrame:
    """Adds `rank` (within the class, 1 = lowest matching loss), `kept` and `reason` (GRADMM, section 4.3).

    Exact duplicates, but for case and blanks, are dropped first, the best of them kept. Equal losses are ranked
    by id, so that the choice does not depend on the rows' order.
    """
    ordered = texts.sort_values(["label", "matching_loss", "id"], ignore_index=True)
    spelling = ordered["text"].str.casefold().str.split().str.join(" ")
    duplicate = pd.DataFrame({"label": ordered["label"], "spelling": spelling}).duplicated()
    unique_rank = (~duplicate).groupby(ordered["label"]).cumsum()
    kept = ~duplicate & (unique_rank <= settings.per_class)
    reason = pd.Series("", index=ordered.index)
    reason[~kept] = "higher matching loss than the texts kept"
    reason[duplicate] = "duplicate"
    rank = ordered.groupby("label").cumcount() + 1
    return ordered.assign(rank=rank, kept=kept, reason=reason)
