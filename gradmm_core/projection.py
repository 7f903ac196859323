"""The projection of the ADMM's second step: from free embeddings to the tokens of a readable text."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm_core.language_model import LanguageModel
from gradmm_core.opening import Opening
from gradmm_core.settings import ProjectionSettings
from gradmm_core.vocabulary import AllowedTokens


class Projector:
    """P of GRADMM (section 4.2): left to right, one token per row of X, guided by the language model.

    Given an instruction and the tokens chosen so far, the model names its k likeliest allowed next tokens, and
    the one whose embedding is nearest to X's row is taken (`nearest-of-likely`). `likeliest-of-near` swaps the
    two: the likeliest of the k nearest, as the published code does. `nearest` ignores the model.

    The instruction is read once; each position then costs one token's step with a key-value cache, for all
    examples together.
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
        self._opening = Opening(language_model, instruction)

    @torch.no_grad()
    def __call__(self, x: Float[Tensor, "batch tokens hidden"]) -> Int[Tensor, "batch tokens"]:
        """Token ids of P(x). Rows of the batch do not affect each other."""
        x = x.to(self._embeddings.dtype)
        if self._settings.rule == "nearest":
            columns = [self._nearest(x[:, j], first=j == 0) for j in range(x.shape[1])]
            return torch.stack(columns, dim=1)
        cache, hidden = self._opening.begin(len(x))
        chosen: list[Int[Tensor, " batch"]] = []
        for j in range(x.shape[1]):
            if j > 0:
                hidden = self._opening.append(cache, chosen[-1][:, None])
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
        if self._settings.rule == "nearest-of-likely":
            candidates = logits.topk(k, dim=1).indices
            best = distances.gather(1, candidates).argmin(dim=1, keepdim=True)
        else:
            candidates = distances.topk(k, dim=1, largest=False).indices
            best = logits.gather(1, candidates).argmax(dim=1, keepdim=True)
        return self._allowed.ids[candidates.gather(1, best)[:, 0]]

    def _nearest(self, rows: Float[Tensor, "batch hidden"], first: bool) -> Int[Tensor, " batch"]:
        distances = self._distances(rows)
        if first:
            distances = distances.masked_fill(self._cannot_start, torch.inf)
        return self._allowed.ids[distances.argmin(dim=1)]

    def _distances(self, rows: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch allowed"]:
        """Squared distances to the allowed embeddings, less ||row||^2, which changes no comparison."""
        return self._square_norms - 2 * rows @ self._embeddings.mT

    def _choices(self, first: bool) -> int:
        return len(self._allowed.ids) - int(self._cannot_start.sum()) if first else len(self._allowed.ids)
