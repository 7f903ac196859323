"""Texts repeated with labels in proportion to their probabilities, for trainers that take no probabilities.

The mean loss over the copies of a text is its expected loss under its probabilities, up to their rounding to whole
copies. The rounding differs from text to text, so that a class that is unlikely everywhere keeps its share of all
copies.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

#: Copies of each text. The probabilities are rounded to multiples of its inverse.
COPIES = 10

#: Its multiples are spread evenly over [0, 1), and so are those of any run of texts.
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def label_counts(
    probabilities: Float[np.ndarray, "texts classes"], copies: int = COPIES
) -> Int[np.ndarray, "texts classes"]:
    """Divide `copies` among the classes of each text by systematic sampling.

    Class k gets floor(c_k + u) - floor(c_(k-1) + u) of the copies, with c_k the cumulative probabilities times
    `copies`, and an offset u of each text. Each count is within one of `copies` times the probability, each text's
    counts add up to `copies`, and a class's total is close to its expectation.
    """
    offsets = (np.arange(len(probabilities)) + 0.5) * GOLDEN_RATIO % 1
    ends = np.floor(np.cumsum(probabilities, axis=1) * copies + offsets[:, None]).astype(np.int64)
    ends[:, -1] = copies
    return np.diff(ends.clip(max=copies), axis=1, prepend=0)
