"""Texts that the model writes by itself from a public instruction: nothing in them is from private data."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm_core.language_model import LanguageModel
from gradmm_core.opening import Opening
from gradmm_core.vocabulary import AllowedTokens


@torch.no_grad()
def write_texts(
    language_model: LanguageModel,
    allowed: AllowedTokens,
    opening: Opening,
    uniforms: Float[np.ndarray, "count tokens"],
    top_k: int = 200,
    batch_size: int = 256,
) -> Int[Tensor, "count tokens"]:
    """Samples texts that go on from an opening, each token among the `top_k` likeliest allowed (temperature 1).

    The first token is one that may start a text. Text i depends on `uniforms[i]` alone, by inverting the
    distribution function of one token after another, so the same numbers give the same text in any batch.

    Args:
        uniforms: numbers in [0, 1), one for each token.
    """
    head = language_model.head[allowed.ids]
    parts = []
    for start in range(0, len(uniforms), batch_size):
        drawn = torch.from_numpy(uniforms[start : start + batch_size])
        text = allowed.ids.new_empty(len(drawn), 0)
        cache, hidden = opening.begin(len(drawn))
        for j in range(drawn.shape[1]):
            if j > 0:
                hidden = opening.append(cache, text[:, -1:])
            logits = language_model.augment(hidden) @ head.mT
            if j == 0:
                logits = allowed.first_logits(logits)
            likely = logits.topk(min(top_k, logits.shape[1]), dim=1)
            # In float64 on the CPU: the same choice on every device, but for the logits' own rounding.
            cumulative = likely.values.double().cpu().softmax(dim=1).cumsum(dim=1)
            pick = torch.searchsorted(cumulative, drawn[:, j, None] * cumulative[:, -1:], right=True)
            pick = pick.clamp_max(cumulative.shape[1] - 1).to(likely.indices.device)
            text = torch.cat([text, allowed.ids[likely.indices.gather(1, pick)]], dim=1)
        parts.append(text)
    return torch.cat(parts)
