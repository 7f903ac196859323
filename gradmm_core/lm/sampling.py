"""Sampling of texts: the model continues a public instruction, and has no access to private data."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.vocabulary import AllowedTokens

#: Texts that are written together.
BATCH_SIZE = 256


@torch.no_grad()
def write_texts(
    language_model: LanguageModel,
    allowed: AllowedTokens,
    prompt_cache: PromptCache,
    uniforms: Float[np.ndarray, "count tokens"],
    top_k: int = 200,
    batch_size: int = BATCH_SIZE,
    tilt: Float[Tensor, " vocab"] | None = None,
    ends: SentenceEnds | None = None,
    title: str | None = None,
    beginnings: Int[Tensor, "count begun"] | None = None,
) -> Int[Tensor, "count tokens"]:
    """Sample texts that continue a prompt, each token among the `top_k` likeliest allowed (temperature 1).

    The first token is one that may start a text. Each token inverts its distribution function at one number, so
    text i depends on `uniforms[i]` alone and is the same in any batch.

    Args:
        uniforms: numbers in [0, 1), one per token.
        tilt: added to the logits of tokens that begin a word, before the likeliest are found. Those that continue
            a word depend on its beginning, and are left as they are. Rates count the texts with a token, so a
            positive tilt ends with the token's first use in a text.
        ends: cut texts at their last sentence end, see `SentenceEnds.cut`; None: not at all.
        title: of the progress bar; None: show no progress.
        beginnings: the first tokens of each text, which are not sampled, and whose numbers are not used; None: a
            text begins with its first sampled token.
    """
    head = language_model.head[allowed.ids]
    if tilt is not None:
        tilt = tilt.to(head)[allowed.ids].masked_fill(allowed.continues_word, 0.0)
    begun = allowed.ids.new_empty(len(uniforms), 0) if beginnings is None else beginnings
    parts = []
    starts = range(0, len(uniforms), batch_size)
    for start in tqdm(starts, desc=title, disable=title is None or None, leave=False):
        drawn = torch.from_numpy(uniforms[start : start + batch_size])
        text = begun[start : start + batch_size]
        added = None if tilt is None else tilt.repeat(len(drawn), 1)
        cache, hidden = prompt_cache.begin(len(drawn))
        for j in range(text.shape[1], drawn.shape[1]):
            if j > 0:  # the beginning at once, and then token by token
                hidden = prompt_cache.append(cache, text if j == begun.shape[1] else text[:, -1:])
            logits = language_model.augment(hidden) @ head.mT
            if added is not None:
                logits = logits + added
            if j == 0:
                logits = allowed.first_logits(logits)
            likely = logits.topk(min(top_k, logits.shape[1]), dim=1)
            # In float64 on the CPU, so that only the rounding of the logits depends on the device.
            cumulative = likely.values.double().cpu().softmax(dim=1).cumsum(dim=1)
            pick = torch.searchsorted(cumulative, drawn[:, j, None] * cumulative[:, -1:], right=True)
            pick = pick.clamp_max(cumulative.shape[1] - 1).to(likely.indices.device)
            chosen = likely.indices.gather(1, pick)
            text = torch.cat([text, allowed.ids[chosen]], dim=1)
            if added is not None:
                added.scatter_(1, chosen, added.gather(1, chosen).clamp_max(0.0))
        parts.append(text)
    texts = torch.cat(parts)
    return texts if ends is None else ends.cut(texts)
