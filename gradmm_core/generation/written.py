"""Generate without a search: keep texts as the model writes them from the class's instruction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradmm.config.settings import WrittenSettings
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.result import GenerationResult
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.vocabulary import AllowedTokens


class Writer:
    """Samples texts of one class, and samples again those that contain an answer, a limited number of times."""

    def __init__(
        self,
        language_model: LanguageModel,
        allowed: AllowedTokens,
        constraints: TextConstraints,
        instruction: str,
        settings: WrittenSettings,
        tilt: Float[Tensor, " vocab"] | None = None,
        ends: SentenceEnds | None = None,
    ) -> None:
        self._lm = language_model
        self._allowed = allowed
        self._constraints = constraints
        self._settings = settings
        self._tilt = tilt
        self._prompt_cache = PromptCache(language_model, instruction)
        self._ends = ends

    @torch.no_grad()
    def __call__(self, generators: Sequence[np.random.Generator], tokens: int) -> GenerationResult:
        """Write one text for each generator; texts do not affect one another.

        A text is the generator's first sample that contains no class's answer and, if required, ends with a
        sentence; or the last sample if none does.

        Returns:
            The texts, with NaN for their losses and an empty history.
        """
        ids = self._samples(generators, tokens)
        pending = torch.arange(len(ids), device=ids.device)
        for _ in range(self._settings.draws - 1):
            pending = pending[~self._valid(ids[pending])]
            if not len(pending):
                break
            ids[pending] = self._samples([generators[i] for i in pending.tolist()], tokens)
        losses = torch.full((len(ids),), torch.nan, dtype=self._lm.head_dtype)
        return GenerationResult(ids, losses, losses.new_empty(0, len(ids)))

    def _samples(self, generators: Sequence[np.random.Generator], tokens: int) -> Int[Tensor, "texts tokens"]:
        uniforms: Float[np.ndarray, "texts tokens"] = np.stack([random.random(tokens) for random in generators])
        top_k = self._settings.top_k
        return write_texts(
            self._lm, self._allowed, self._prompt_cache, uniforms, top_k, tilt=self._tilt, ends=self._ends
        )

    def _valid(self, ids: Int[Tensor, "texts tokens"]) -> Bool[Tensor, " texts"]:
        valid = self._constraints.without_answer(ids)
        return valid if self._ends is None else valid & self._ends.complete(ids)
