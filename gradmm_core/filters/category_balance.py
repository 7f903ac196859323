"""Balance the classes' mean matching losses by dropping the worst texts of the worse classes."""

from __future__ import annotations

import pandas as pd

from gradmm.config.settings import CategoryBalanceSettings


def balance_categories(texts: pd.DataFrame, settings: CategoryBalanceSettings) -> pd.DataFrame:
    """Add the columns `kept` and `reason` (GRADMM, section 4.3).

    The lowest mean matching loss of a class is the threshold. Each other class drops its texts with the highest
    loss until its mean is at most the threshold or `floor` texts are left. The published code has no floor and can
    empty a class. Texts without a matching loss are all kept.
    """
    if not settings.enabled or texts["matching_loss"].isna().all():
        return texts.assign(kept=True, reason="")
    ordered = texts.sort_values(["label", "matching_loss", "id"], ignore_index=True)
    losses = ordered.groupby("label")["matching_loss"]
    threshold = losses.mean().min()
    # The running mean of sorted losses increases, so the texts up to the threshold are the first ones.
    position = losses.cumcount() + 1
    running_mean = losses.cumsum() / position
    below = running_mean <= threshold * (1 + 1e-9) + 1e-12
    kept = below | (position <= settings.floor)
    reason = kept.map({True: "", False: "its class matches worse than the best class"})
    return ordered.assign(kept=kept, reason=reason)
