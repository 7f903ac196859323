"""Evens out how well the classes match, by dropping the worst texts of the worse classes."""

from __future__ import annotations

import pandas as pd

from gradmm_core.settings import CategoryBalanceSettings


def balance_categories(texts: pd.DataFrame, settings: CategoryBalanceSettings) -> pd.DataFrame:
    """Sets `kept` and `reason` (GRADMM, section 4.3).

    The class with the lowest mean matching loss sets the mark. From every other class the texts with the
    highest loss are dropped until its mean is not above the mark, or `floor` texts are left: the published
    code has no floor and can empty a class.
    """
    if not settings.enabled:
        return texts.assign(kept=True, reason="")
    ordered = texts.sort_values(["label", "matching_loss", "id"], ignore_index=True)
    losses = ordered.groupby("label")["matching_loss"]
    mark = losses.mean().min()
    # Sorted by loss, the mean of a class's first texts only grows: those it stays below the mark for are kept.
    position = losses.cumcount() + 1
    running_mean = losses.cumsum() / position
    below = running_mean <= mark + 1e-12
    kept = below | (position <= settings.floor)
    reason = kept.map({True: "", False: "its class matches worse than the best class"})
    return ordered.assign(kept=kept, reason=reason)
