"""Texts repeated with labels in proportion to their probabilities, for trainers that take no probabilities.

The mean loss over the copies of a text is its expected loss under its probabilities, up to their rounding to whole
copies.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

#: Copies of each text. The probabilities are rounded to multiples of its inverse.
COPIES = 10


def label_counts(
    probabilities: Float[np.ndarray, "texts classes"], copies: int = COPIES
) -> Int[np.ndarray, "texts classes"]:
    """Divide `copies` among the classes of each text by the method of largest remainders.

    Each count is within one of `copies` times the probability, and each text's counts add up to `copies`. Equal
    remainders go to the first class.
    """
    quotas = probabilities * copies
    counts = np.floor(quotas + 1e-9).astype(np.int64)  # 0.3 * 10 must not become 2
    missing = copies - counts.sum(axis=1)
    order = np.argsort(-(quotas - counts), axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    return counts + (place < missing[:, None])
