from __future__ import annotations

from math import nan

import pandas as pd
import pytest

from gradmm.metrics.text_figures import text_figures


def test_figures_are_means_and_diversity_over_all_texts() -> None:
    words = ["the soup was warm", "the soup was cold"]
    texts = pd.DataFrame({"text": words, "matching_loss": [0.1, 0.3], "log_perplexity": 4.0})
    figures = text_figures(texts.assign(probe_loss=nan))
    assert figures["texts"] == 2
    assert figures["mean_matching_loss"] == pytest.approx(0.2)
    assert "mean_probe_loss" not in figures
    assert figures["mean_log_perplexity"] == 4.0
    assert figures["distinct_2"] == pytest.approx(4 / 6)
    # 3 of 4 words, 2 of 3 pairs, 1 of 2 triples, and no quadruple
    assert figures["self_bleu"] == pytest.approx((3 / 4 * 2 / 3 * 1 / 2 * 0.1) ** 0.25)
    assert text_figures(texts.assign(probe_loss=[1.0, 2.0]))["mean_probe_loss"] == 1.5
