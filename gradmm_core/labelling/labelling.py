"""The stage `labelling`: give each text that passed the filters its class probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradmm.config.settings import LabellingSettings, TargetGradientSettings
from gradmm.errors import InputError

#: Columns that this stage replaces: all rows are kept.
DECISION = ["kept", "reason"]

#: Probabilities of a text add up to 1 but for rounding.
MAX_EXCESS = 1e-6

#: A stage's output was changed by hand, or by another program.
REMAKE = "delete this output of the stage, and run again"


def uses_release(settings: LabellingSettings, released: TargetGradientSettings) -> bool:
    """Return whether texts are labelled by what was released with the target: a probe or token rates.

    Args:
        released: the target's settings after parts that do not fit were left out, see `ReleasePlan`.
    """
    return settings.release and (released.probe_share > 0 or released.token_share > 0)


def labelled_texts(
    texts: pd.DataFrame,
    probabilities: Float[np.ndarray, "texts classes"] | None,
    names: Mapping[int, str],
) -> pd.DataFrame:
    """Add the columns `written_for` and `probabilities`; `label` and `label_name` become the likeliest class's.

    Args:
        texts: rows of the last filter. Their label is the class that each text was written for.
        probabilities: one column for each of `names`, in their order; None to give each text the class that it was
            written for, with probability 1.
        names: class names, keyed by label.
    """
    labels = np.array(list(names))
    written_for = np.asarray(texts["label"])
    certain = np.equal.outer(written_for, labels).astype(float)
    chosen = certain if probabilities is None else probabilities
    likeliest = labels[chosen.argmax(axis=1)]
    return texts.drop(columns=DECISION, errors="ignore").assign(
        written_for=written_for,
        label=likeliest,
        label_name=[names[label] for label in likeliest.tolist()],
        probabilities=list(chosen),
    )


def labelling_figures(texts: pd.DataFrame, names: Mapping[int, str]) -> dict[str, Any]:
    """Compute figures of labelled texts.

    `texts_by_label` counts the texts by their likeliest class and `expected_by_label` by their probabilities;
    `agreement` is the share of texts whose likeliest class is the one that they were written for; `confidence` is
    the mean probability of the likeliest class; `entropy` is in nats.
    """
    probabilities = probability_matrix(texts)
    logs = np.log(np.where(probabilities > 0, probabilities, 1.0))
    return {
        "texts": len(texts),
        "texts_by_label": {str(label): int((texts["label"] == label).sum()) for label in names},
        "expected_by_label": {
            str(label): float(total) for label, total in zip(names, probabilities.sum(axis=0), strict=True)
        },
        "agreement": float((texts["label"] == texts["written_for"]).mean()),
        "confidence": float(probabilities.max(axis=1).mean()),
        "entropy": float(-(probabilities * logs).sum(axis=1).mean()),
    }


def probability_matrix(texts: pd.DataFrame) -> Float[np.ndarray, "texts classes"]:
    """Return the probabilities of labelled texts, which Parquet returns as one array for each row.

    Raises:
        InputError: if texts have different numbers of probabilities, or a text's are negative, not finite or do
            not add up to 1.
    """
    rows = [np.asarray(row, dtype=float) for row in texts["probabilities"]]
    if len({len(row) for row in rows}) > 1:
        raise InputError("the texts have different numbers of probabilities", "labelling", REMAKE)
    probabilities = np.stack(rows)
    totals = probabilities.sum(axis=1)
    wrong = ~((probabilities >= 0).all(axis=1) & (np.abs(totals - 1) < MAX_EXCESS))  # so that NaN is wrong
    if wrong.any():
        row = int(wrong.argmax())
        problem = (
            f"the probabilities of text {texts['id'].iloc[row]} are negative or add up to {totals[row]:.6g}, not 1"
        )
        raise InputError(problem, "labelling", REMAKE)
    return probabilities
