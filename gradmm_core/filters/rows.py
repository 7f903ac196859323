"""Read the rows that a filter kept, and compute its figures; shared by the three filters."""

from __future__ import annotations

from typing import Any

import pandas as pd

from gradmm.config.recipe import Recipe
from gradmm.config.settings import TargetGradientSettings
from gradmm.metrics.text_figures import text_figures


def kept_texts(texts: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that a filter kept, without the columns `kept` and `reason`."""
    return texts[texts["kept"]].drop(columns=["kept", "reason"]).reset_index(drop=True)


def token_lists(texts: pd.DataFrame) -> list[list[int]]:
    """Convert the texts' token ids, which Parquet returns as NumPy arrays, to lists."""
    return [[int(token) for token in ids] for ids in texts["token_ids"]]


def filter_figures(texts: pd.DataFrame) -> dict[str, Any]:
    """Count the kept texts, in total and by label, and compute their `text_figures`, if there are any."""
    kept = texts[texts["kept"]]
    by_label = kept.groupby("label").size().reindex(sorted(texts["label"].unique()), fill_value=0)
    counts = {"kept": len(kept), "kept_by_label": {str(k): int(v) for k, v in by_label.items()}}
    return counts | (text_figures(kept) if len(kept) else {})


def filters_by_probe(recipe: Recipe, released: TargetGradientSettings) -> bool:
    """Return whether the label filter uses the released probe.

    Args:
        released: the target's settings after parts that do not fit were left out, see `ReleasePlan`.
    """
    return recipe.label_filter.enabled and released.probe_chooses_texts and recipe.generation.probe_weight > 0
