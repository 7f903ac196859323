"""Rates of tokens in texts: how often texts of a class contain each token of the vocabulary.

A text's vector is t = (b / |b|, CONSTANT) / sqrt(1 + CONSTANT^2), where b has the token's weight for each token
that the text contains, and is zero elsewhere. It has norm 1 whatever the text, so sums over records have a
sensitivity without clipping. Divided by the number of records, which the constant counts, a sum gives the mean of
b / |b|: the tokens' *rates*.

All tokens of a text share its norm of 1, and every token's sum gets the same noise. The weights decide which
tokens stand out from it. They follow from the document frequencies f_v of public text, the expected share of the
model's own texts that contain token v:

    weight_v = 1 / sqrt(f_v + RARE)   if f_v < COMMON, else 0

Let theta_v be the relative difference of a token's rates between two classes. Its signal is proportional to
f_v weight_v theta_v, and what it tells a classifier to f_v theta_v^2. So by these weights a token's signal is, but
for the rarest, the square root of what it tells. Common tokens are in texts of every kind: they tell least for
what they would take of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.vocabulary import AllowedTokens
from gradmm.privacy.sensitivity import CONSTANT

#: Tokens that at least this share of public texts contain have no weight.
COMMON = 0.05

#: Tokens that are much rarer in public text than this have the same weight.
RARE = 0.01

#: Smallest document frequency, so that a token that the model never writes has a rate to compare with.
MIN_FREQUENCY = 1e-5

#: Logits in memory at a time while frequencies are computed.
LOGITS = 2**24


@torch.no_grad()
def document_frequencies(
    language_model: LanguageModel, allowed: AllowedTokens, instruction: str, texts: Sequence[Sequence[int]]
) -> Float[Tensor, " vocabulary"]:
    """Compute the expected share of the model's texts that contain each token; float64, on the CPU.

    The mean over texts of 1 - prod over positions (1 - p(token)), with the model's probabilities of the next
    token, and at least `MIN_FREQUENCY`. Counts say less about the many tokens that none of the texts contains.

    Args:
        texts: token ids of texts that the model wrote from the instruction with these tokens, all equally long.
    """
    ids = torch.tensor(texts, device=language_model.device)
    prompt, head = PromptCache(language_model, instruction), language_model.head[allowed.ids]
    rows = max(1, LOGITS // (ids.shape[1] * len(head)))
    present = torch.zeros(len(head), dtype=torch.float64)
    for part in ids.split(rows):
        cache, first = prompt.begin(len(part))
        states = first[:, None]
        if ids.shape[1] > 1:
            states = torch.cat([states, prompt.states(cache, part[:, :-1])], dim=1)
        logits = language_model.augment(states) @ head.mT
        logits[:, 0] = allowed.first_logits(logits[:, 0])
        absent = logits.softmax(dim=2).clamp_max_(0.999).neg_().log1p_().sum(dim=1)
        present += absent.expm1_().neg_().sum(dim=0, dtype=torch.float64).cpu()
    frequencies = torch.full((len(language_model.embeddings),), MIN_FREQUENCY, dtype=torch.float64)
    frequencies[allowed.ids.cpu()] = (present / len(ids)).clamp_min(MIN_FREQUENCY)
    return frequencies


def token_weights(frequencies: Float[Tensor, " vocabulary"]) -> Float[Tensor, " vocabulary"]:
    """Compute the weight of each token from the document frequencies of public text; float64.

    In float32, the norm of a text's vector could be above 1 by its rounding.
    """
    frequencies = frequencies.double()
    return torch.where(frequencies < COMMON, (frequencies + RARE).rsqrt(), 0.0)


def token_presence(
    texts: Sequence[Sequence[int]], weights: Float[Tensor, " vocabulary"]
) -> Float[Tensor, "texts vocabulary_and_one"]:
    """Compute each text's vector t from its token ids; float64, on the CPU. Repeated tokens count once."""
    rows = torch.zeros(len(texts), len(weights) + 1, dtype=torch.float64)
    for row, text in zip(rows, texts, strict=True):
        tokens = torch.tensor(sorted(set(text)), dtype=torch.int64)
        own = weights[tokens]
        row[tokens] = own / own.norm().clamp_min(1e-300)
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
