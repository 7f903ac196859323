"""What the three filters have in common: rows that are kept, and what to say of them."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from gradmm_core.errors import InputError
from gradmm_core.variety import distinct_n, self_bleu


def kept_texts(texts: pd.DataFrame) -> pd.DataFrame:
    """The rows that a filter kept, without its verdict."""
    return texts[texts["kept"]].drop(columns=["kept", "reason"]).reset_index(drop=True)


def token_lists(texts: pd.DataFrame) -> list[list[int]]:
    """The token ids of each text; read from Parquet they are NumPy arrays."""
    return [[int(token) for token in ids] for ids in texts["token_ids"]]


def filter_figures(texts: pd.DataFrame, stage: str) -> dict[str, Any]:
    """How many texts are left, of each label, and how well they match and read.

    Raises:
        InputError: if a label that came in has no text left.
    """
    kept = texts[texts["kept"]]
    by_label = kept.groupby("label").size().reindex(sorted(texts["label"].unique()), fill_value=0)
    if (by_label == 0).any():
        raise InputError(
            f"no text of label {by_label.idxmin()} is left after {stage}",
            stage,
            "generate more (generation.per_class), or relax this filter",
        )
    return {"kept": len(kept), "kept_by_label": {str(k): int(v) for k, v in by_label.items()}} | text_figures(kept)


def text_figures(texts: pd.DataFrame) -> dict[str, Any]:
    """How many texts there are, how well they match, how well they read and how varied they are."""
    probe = texts["probe_loss"].mean()
    return {
        "texts": len(texts),
        "mean_matching_loss": float(texts["matching_loss"].mean()),
        **({} if math.isnan(probe) else {"mean_probe_loss": float(probe)}),
        "mean_log_perplexity": float(texts["log_perplexity"].mean()),
        "distinct_2": distinct_n(texts["text"], 2),
        "self_bleu": self_bleu(texts["text"].tolist()),
    }
