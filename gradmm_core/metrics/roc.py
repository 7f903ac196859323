"""ROC figures of a test that calls high scores positive."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score, roc_curve


class RocFigures(TypedDict):
    """Area under the ROC curve, and the largest TPR at an FPR of at most 1% and of at most 0.1%."""

    auc: float
    tpr_at_1_fpr: float
    tpr_at_01_fpr: float


def roc_figures(
    positives: Float[np.ndarray, " positives"], negatives: Float[np.ndarray, " negatives"]
) -> RocFigures:
    """Compute the figures from the scores of positives and negatives; there must be both."""
    at_1, at_01 = tpr_within(np.array([0.01, 0.001]), positives, negatives)
    auc = float(roc_auc_score(*_labels_and_scores(positives, negatives)))
    return RocFigures(auc=auc, tpr_at_1_fpr=at_1, tpr_at_01_fpr=at_01)


def tpr_within(
    rates: Float[np.ndarray, " rates"],
    positives: Float[np.ndarray, " positives"],
    negatives: Float[np.ndarray, " negatives"],
) -> list[float]:
    """Find, for each rate, the largest TPR at an FPR of at most this rate."""
    false_positives, true_positives, _ = roc_points(positives, negatives)
    return true_positives[false_positives.searchsorted(rates, side="right") - 1].tolist()


def roc_points(
    positives: Float[np.ndarray, " positives"], negatives: Float[np.ndarray, " negatives"]
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"], Float[np.ndarray, " points"]]:
    """Return FPR, TPR and threshold at each point of the curve; the first point calls nothing positive."""
    return roc_curve(*_labels_and_scores(positives, negatives), drop_intermediate=False)


def delong(
    positives: Float[np.ndarray, " positives"], negatives: Float[np.ndarray, " negatives"]
) -> tuple[float, float]:
    """Return the AUC and its standard deviation (DeLong et al. 1988, by the ranks of Sun and Xu 2014)."""
    m, n = len(positives), len(negatives)
    ranks = rankdata(np.concatenate([positives, negatives]))
    above = (ranks[:m] - rankdata(positives)) / n  # the share of negatives below each positive
    below = 1 - (ranks[m:] - rankdata(negatives)) / m
    return float(above.mean()), math.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n)


def _labels_and_scores(
    positives: Float[np.ndarray, " positives"], negatives: Float[np.ndarray, " negatives"]
) -> tuple[np.ndarray, Float[np.ndarray, " scores"]]:
    return np.repeat([1, 0], [len(positives), len(negatives)]), np.concatenate([positives, negatives])
