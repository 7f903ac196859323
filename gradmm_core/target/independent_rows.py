"""How many texts a batch may hold, such that each one's numbers do not depend on its row or on the other texts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel

logger = logging.getLogger("gradmm.target")

#: Computes texts' numbers, texts x numbers, in one batch; from their token ids, texts x tokens.
Numbers = Callable[[Int[np.ndarray, "texts tokens"]], Float[Tensor, "texts numbers"]]


def independent_rows(language_model: LanguageModel, rows: int, tokens: int, numbers: Numbers) -> int:
    """Return `rows`, or 1 if the numbers of random texts depend on their row or on the other texts.

    It is 1 also where random texts need not show it (`LanguageModel.coupling`).

    Args:
        tokens: of each text.
        numbers: all that a record's contribution is made of. A few of them could be equal by chance.

    Raises:
        InputError: if the numbers of one text differ between two passes.
    """
    coupling = language_model.coupling
    if rows > 1 and not coupling and _same_bits(language_model, rows, tokens, numbers):
        return rows
    if not _same_bits(language_model, 1, tokens, numbers):
        raise InputError(
            "the model gives one text different numbers in two passes, so no sensitivity can be stated",
            "model.device",
            "use 'cpu', or a model without random or unordered operations",
        )
    if rows > 1:
        problem = coupling or "the row of a batch changes a text's numbers"
        _warn(f"{problem}: some texts are computed one at a time")
    return 1


@cache
def _warn(problem: str) -> None:
    """Log once: a line for each length would tell which lengths private texts have."""
    logger.warning(problem)


def _same_bits(language_model: LanguageModel, rows: int, tokens: int, numbers: Numbers) -> bool:
    """Check that random texts' numbers have the same bits in other rows, and beside other texts.

    In the second pass each text has the next row. In the third pass it has its first row again, and every second
    text is one repeated token.
    """
    random = np.random.default_rng(tokens)
    texts = random.integers(0, language_model.embeddings.shape[0], (rows, tokens))
    other = np.where(np.arange(rows)[:, None] % 2, texts, texts[0, 0]) if rows > 1 else texts
    first, moved, beside = (numbers(each) for each in (texts, np.roll(texts, 1, axis=0), other))
    return torch.equal(first, moved.roll(-1, dims=0)) and torch.equal(first[rows > 1 :: 2], beside[rows > 1 :: 2])
