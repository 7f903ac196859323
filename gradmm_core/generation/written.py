"""Generate without a search: keep texts as the model writes them from the class's instruction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gradmm.config.settings import WrittenSettings
from gradmm.generation.constraints import TextConstraints
from gradmm.generation.result import GenerationResult
from gradmm.generation.sampler import Sampler
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.sentences import SentenceEnds


class Writer:
    """Samples texts of one class, and samples again those that contain an answer, a limited number of times."""

    def __init__(
        self,
        language_model: LanguageModel,
        sampler: Sampler,
        constraints: TextConstraints,
        settings: WrittenSettings,
        ends: SentenceEnds | None = None,
    ) -> None:
        self._lm = language_model
        self._sampler = sampler
        self._constraints = constraints
        self._settings = settings
        self._ends = ends

    @torch.no_grad()
    def __call__(self, generators: Sequence[np.random.Generator], tokens: int) -> GenerationResult:
        """Write one text for each generator; texts do not affect one another.

        A text is the generator's first sample that contains no class's answer and, if required, ends with a
        sentence; or the last sample if none does.

        Returns:
            The texts, with NaN for their losses and an empty history.
        """
        ids = self._sampler(generators, tokens)
        pending = torch.arange(len(ids), device=ids.device)
        for _ in range(self._settings.draws - 1):
            pending = pending[~self._valid(ids[pending])]
            if not len(pending):
                break
            ids[pending] = self._sampler([generators[i] for i in pending.tolist()], tokens)
        losses = torch.full((len(ids),), torch.nan, dtype=self._lm.head_dtype)
        return GenerationResult(ids, losses, losses.new_empty(0, len(ids)))

    def _valid(self, ids: Int[Tensor, "texts tokens"]) -> Bool[Tensor, " texts"]:
        valid = self._constraints.without_answer(ids)
        return valid if self._ends is None else valid & self._ends.complete(ids)
