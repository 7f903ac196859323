"""How much of a target its noise has left."""

from __future__ import annotations

import numpy as np
import pandas as pd


def target_cosine(clean: pd.DataFrame, noisy: pd.DataFrame) -> float:
    """Between two targets in one space, all classes as one vector, in float64; 0 where one of them is zero.

    Of the gradients alone: by the noise, a probe has more directions or fewer.

    Args:
        clean, noisy: rows of the stage `target_gradient`.

    Raises:
        ValueError: if they have not the same rows.
    """
    first, second = (frame[frame["part"] == "gradient"].sort_values(["label", "row"]) for frame in (clean, noisy))
    if first[["label", "row"]].to_numpy().tolist() != second[["label", "row"]].to_numpy().tolist():
        raise ValueError("targets in different spaces have no cosine")
    a, b = (np.concatenate(frame["values"].to_list()).astype(np.float64) for frame in (first, second))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0
