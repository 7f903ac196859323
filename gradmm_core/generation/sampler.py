"""Draw texts of one class from its instruction, by the recipe's model or by a served one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.vocabulary import AllowedTokens


@runtime_checkable
class Sampler(Protocol):
    """Draws texts. Each depends on its generator alone, the only source of randomness."""

    def __call__(
        self, generators: Sequence[np.random.Generator], tokens: int, draws: int = 1
    ) -> Int[Tensor, "texts tokens"]:
        """Draw `draws` texts for each generator, in order, of at most `tokens` tokens.

        Returns:
            Token ids, padded with `PAD` after a text's end.
        """
        ...


class ModelSampler:
    """Draws texts from the recipe's model; see `write_texts` for the arguments."""

    def __init__(
        self,
        language_model: LanguageModel,
        allowed: AllowedTokens,
        instruction: str,
        top_k: int,
        tilt: Float[Tensor, " vocab"] | None = None,
        ends: SentenceEnds | None = None,
    ) -> None:
        self._lm = language_model
        self._allowed = allowed
        self._prompt_cache = PromptCache(language_model, instruction)
        self._top_k = top_k
        self._tilt = tilt
        self._ends = ends

    @torch.no_grad()
    def __call__(
        self, generators: Sequence[np.random.Generator], tokens: int, draws: int = 1
    ) -> Int[Tensor, "texts tokens"]:
        uniforms = np.concatenate([random.random((draws, tokens)) for random in generators])
        return write_texts(
            self._lm, self._allowed, self._prompt_cache, uniforms, self._top_k, tilt=self._tilt, ends=self._ends
        )
