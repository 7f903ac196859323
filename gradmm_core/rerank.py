"""Generation without optimisation: of many texts that the model writes, the one that matches best."""

from __future__ import annotations

import torch

from gradmm_core.admm import GenerationResult, Objective
from gradmm_core.language_model import LanguageModel
from gradmm_core.opening import Opening
from gradmm_core.public_text import write_texts
from gradmm_core.settings import RerankSettings
from gradmm_core.vocabulary import AllowedTokens


@torch.no_grad()
def rerank(
    language_model: LanguageModel,
    objective: Objective,
    allowed: AllowedTokens,
    opening: Opening,
    tokens: int,
    settings: RerankSettings,
    seed: int,
) -> GenerationResult:
    """One example: the best of `settings.draws` texts. Its history is the losses of all of them, as drawn."""
    texts = write_texts(language_model, allowed, opening, settings.draws, tokens, seed, settings.top_k)
    losses = objective(language_model.embed(texts).to(language_model.head_dtype))
    best = losses.argmin(dim=0, keepdim=True)
    return GenerationResult(texts[best], losses[best], losses[:, None])
