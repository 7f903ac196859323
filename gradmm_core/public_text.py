"""Texts that the model writes by itself from a public instruction: nothing in them is from private data."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from gradmm_core.language_model import LanguageModel
from gradmm_core.opening import Opening
from gradmm_core.vocabulary import AllowedTokens


@torch.no_grad()
def write_texts(
    language_model: LanguageModel,
    allowed: AllowedTokens,
    opening: Opening,
    count: int,
    tokens: int,
    seed: int,
    top_k: int = 200,
    batch_size: int = 256,
) -> Int[Tensor, "count tokens"]:
    """Samples texts that go on from an opening, each token among the `top_k` likeliest allowed (temperature 1).

    The first token is one that may start a text. The same seed gives the same texts on the same machine.
    """
    head = language_model.head[allowed.ids]
    random = torch.Generator().manual_seed(seed)
    parts = []
    for begin in range(0, count, batch_size):
        batch = min(batch_size, count - begin)
        cache, hidden = opening.begin(batch)
        chosen: list[Tensor] = []
        for j in range(tokens):
            if j > 0:
                hidden = opening.append(cache, chosen[-1])
            logits = language_model.augment(hidden) @ head.mT
            if j == 0:
                logits = logits.masked_fill(~allowed.starts_text, -torch.inf)
            likely = logits.topk(min(top_k, logits.shape[1]), dim=1)
            # Drawn on the CPU: the same numbers on every device.
            pick = torch.multinomial(likely.values.softmax(dim=1).double().cpu(), 1, generator=random)
            chosen.append(allowed.ids[likely.indices.gather(1, pick.to(likely.indices.device))[:, 0]])
        parts.append(torch.stack(chosen, dim=1))
    return torch.cat(parts)
