"""Figures of a table of texts: their losses, perplexity and diversity."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from gradmm.metrics.diversity import distinct_n, self_bleu


def text_figures(texts: pd.DataFrame) -> dict[str, Any]:
    """Count the texts, and compute their mean losses, mean log-perplexity and diversity."""
    probe = texts["probe_loss"].mean()
    return {
        "texts": len(texts),
        "mean_matching_loss": float(texts["matching_loss"].mean()),
        **({} if math.isnan(probe) else {"mean_probe_loss": float(probe)}),
        "mean_log_perplexity": float(texts["log_perplexity"].mean()),
        "distinct_2": distinct_n(texts["text"], 2),
        "self_bleu": self_bleu(texts["text"].tolist()),
    }
