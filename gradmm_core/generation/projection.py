"""The projection step of ADMM, from free embeddings to the tokens of a readable text."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.config.settings import ProjectionSettings
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.vocabulary import AllowedTokens


class Projector:
    """P of GRADMM (section 4.2): left to right, one token per row of X, guided by the language model.

    Given the instruction and the tokens chosen so far, the rule `nearest-of-likely` chooses, among the model's k
    likeliest allowed next tokens, the one whose embedding is nearest to the row of X. `likeliest-of-near` chooses
    the likeliest of the k nearest tokens, as the published code does. `nearest` ignores the model.

    The instruction is read once. Each position then takes one step of one token with a key-value cache, for the
    whole batch.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        allowed: AllowedTokens,
        instruction: str,
        settings: ProjectionSettings,
    ) -> None:
        self._lm = language_model
        self._settings = settings
        self._allowed = allowed
        self._cannot_start = ~allowed.starts_text
        self._embeddings = language_model.embeddings[allowed.ids].to(language_model.head_dtype)
        self._square_norms = self._embeddings.square().sum(dim=1)
        self._head = language_model.head[allowed.ids]
        self._prompt_cache = PromptCache(language_model, instruction)

    @torch.no_grad()
    def __call__(self, x: Float[Tensor, "batch tokens hidden"]) -> Int[Tensor, "batch tokens"]:
        """Compute the token ids of P(x). Rows of the batch do not affect one another."""
        x = x.to(self._embeddings.dtype)
        if self._settings.rule == "nearest":
            columns = [self._nearest(x[:, j], first=j == 0) for j in range(x.shape[1])]
            return torch.stack(columns, dim=1)
        cache, hidden = self._prompt_cache.begin(len(x))
        chosen: list[Int[Tensor, " batch"]] = []
        for j in range(x.shape[1]):
            if j > 0:
                hidden = self._prompt_cache.append(cache, chosen[-1][:, None])
            logits = self._lm.augment(hidden) @ self._head.mT
            chosen.append(self._choose(logits, self._distances(x[:, j]), first=j == 0))
        return torch.stack(chosen, dim=1)

    def _choose(
        self, logits: Float[Tensor, "batch allowed"], distances: Float[Tensor, "batch allowed"], first: bool
    ) -> Int[Tensor, " batch"]:
        if first:
            logits = self._allowed.first_logits(logits)
            distances = distances.masked_fill(self._cannot_start, torch.inf)
        k = min(self._settings.candidates, self._choices(first))
        match self._settings.rule:
            case "nearest-of-likely":
                candidates = logits.topk(k, dim=1).indices
                best = distances.gather(1, candidates).argmin(dim=1, keepdim=True)
            case "likeliest-of-near":
                candidates = distances.topk(k, dim=1, largest=False).indices
                best = logits.gather(1, candidates).argmax(dim=1, keepdim=True)
            case rule:
                raise AssertionError(f"no choice is written for the rule {rule}")
        return self._allowed.ids[candidates.gather(1, best)[:, 0]]

    def _nearest(self, rows: Float[Tensor, "batch hidden"], first: bool) -> Int[Tensor, " batch"]:
        distances = self._distances(rows)
        if first:
            distances = distances.masked_fill(self._cannot_start, torch.inf)
        return self._allowed.ids[distances.argmin(dim=1)]

    def _distances(self, rows: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch allowed"]:
        """Compute squared distances to the allowed embeddings, minus ||row||^2, which preserves their order."""
        return self._square_norms - 2 * rows @ self._embeddings.mT

    def _choices(self, first: bool) -> int:
        return len(self._allowed.ids) - int(self._cannot_start.sum()) if first else len(self._allowed.ids)
