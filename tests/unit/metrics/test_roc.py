"""The ROC figures of scores written out by hand; brute force is in test_mia_audit.py."""

from __future__ import annotations

import numpy as np
import pytest

from gradmm.metrics.roc import roc_figures


def test_high_scores_are_called_positive() -> None:
    figures = roc_figures(np.array([-1.0, 989.5, 998.5, 2000.0]), np.arange(1000.0))
    assert figures["auc"] == pytest.approx((0 + 990 + 999 + 1000) / 4000)
    assert (figures["tpr_at_1_fpr"], figures["tpr_at_01_fpr"]) == (0.75, 0.5)
