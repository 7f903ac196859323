"""Figures of a table of texts: their losses, perplexity and diversity."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from gradmm.metrics.diversity import distinct_n, self_bleu


def text_figures(texts: pd.DataFrame) -> dict[str, Any]:
    """Count the texts, and compute their mean losses, mean log-perplexity and diversity.

    Losses that no text has are left out.
    """
    losses = {f"mean_{name}": float(texts[name].mean()) for name in ("matching_loss", "probe_loss")}
    return {
        "texts": len(texts),
        **{name: loss for name, loss in losses.items() if not math.isnan(loss)},
        "mean_log_perplexity": float(texts["log_perplexity"].mean()),
        "distinct_2": distinct_n(texts["text"], 2),
        "self_bleu": self_bleu(texts["text"].tolist()),
    }
