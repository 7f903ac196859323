"""Rates of tokens in texts: how often texts of a class contain each token of the vocabulary.

A text's vector is t = (b / |b|, CONSTANT) / sqrt(1 + CONSTANT^2), where b has a one for each token that the text
contains. It has norm 1 whatever the text, so sums over records have a sensitivity without clipping. Divided by the
number of records, which the constant counts, a sum gives the mean of b / |b|: the tokens' *rates*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.privacy.sensitivity import CONSTANT

#: Texts in memory at a time, as rows of one number for each token of the vocabulary.
BATCH = 256


def token_presence(texts: Sequence[Sequence[int]], vocabulary: int) -> Float[Tensor, "texts vocabulary_and_one"]:
    """Compute each text's vector t from its token ids; float64, on the CPU. Repeated tokens count once."""
    rows = torch.zeros(len(texts), vocabulary + 1, dtype=torch.float64)
    for row, text in zip(rows, texts, strict=True):
        tokens = torch.tensor(sorted(set(text)), dtype=torch.int64)
        row[tokens] = 1 / math.sqrt(max(1, len(tokens)))
    rows[:, -1] = CONSTANT
    return rows / math.sqrt(1 + CONSTANT**2)


class ClassRates(NamedTuple):
    """Rates and numbers of records of each class, in the order of the labels.

    Attributes:
        counts: at least 1, since noise can take a count below it.
        noise: standard deviation of the noise in each entry of a class's rates, times its count.
    """

    rates: Float[Tensor, "classes vocabulary"]
    counts: Float[Tensor, " classes"]
    noise: float


@dataclass(frozen=True, eq=False)
class TokenSums:
    """Sums of t over the records of each class; float64.

    Attributes:
        sums: by label.
        noise: standard deviation of the noise in each entry; zero without noise.
    """

    sums: dict[int, Float[Tensor, " vocabulary_and_one"]]
    noise: float = 0.0

    def class_rates(self) -> ClassRates:
        """Divide the sums by the counts."""
        scale = math.sqrt(1 + CONSTANT**2)
        sums = torch.stack(list(self.sums.values())) * scale
        counts = (sums[:, -1] / CONSTANT).clamp_min(1.0)
        return ClassRates(sums[:, :-1] / counts[:, None], counts, self.noise * scale)


def mean_rates(texts: Sequence[Sequence[int]], vocabulary: int) -> Float[Tensor, " vocabulary"]:
    """Compute the tokens' rates in texts without noise; float64."""
    total = torch.zeros(vocabulary + 1, dtype=torch.float64)
    for start in range(0, len(texts), BATCH):
        total += token_presence(texts[start : start + BATCH], vocabulary).sum(dim=0)
    return total[:-1] * math.sqrt(1 + CONSTANT**2) / len(texts)
