"""Compare two targets, such as a noisy and a clean one."""

from __future__ import annotations

import numpy as np
import pandas as pd


def target_cosine(clean: pd.DataFrame, noisy: pd.DataFrame) -> float:
    """Compute the cosine between two targets in one space, with all classes as one vector; 0 if either is zero.

    Only the gradients are compared, because the number of a probe's directions depends on the noise. In float64.

    Args:
        clean, noisy: rows of the stage `target_gradient`.

    Raises:
        ValueError: if their rows differ in label or number.
    """
    first, second = (frame[frame["part"] == "gradient"].sort_values(["label", "row"]) for frame in (clean, noisy))
    if first[["label", "row"]].to_numpy().tolist() != second[["label", "row"]].to_numpy().tolist():
        raise ValueError("targets in different spaces have no cosine")
    a, b = (np.concatenate(frame["values"].to_list()).astype(np.float64) for frame in (first, second))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0
