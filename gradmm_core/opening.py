"""What a text is continued from: an instruction, read once for any number of texts."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm_core.errors import InputError
from gradmm_core.language_model import LanguageModel


class Opening:
    """A language model that has read an instruction and goes on from there, token by token."""

    def __init__(self, language_model: LanguageModel, instruction: str) -> None:
        self._lm = language_model
        self._ids = [*language_model.prefix_ids, *language_model.encode(instruction)]
        if not self._ids:
            raise InputError(f"the instruction {instruction!r} has no tokens", "classes", "write one with words")

    def check_room(self, tokens: int, where: str) -> None:
        """Raises an InputError if the model has no positions for so many tokens after the instruction."""
        self._lm.check_fits(len(self._ids) + tokens, f"an instruction with a text of {tokens} tokens", where)

    def begin(self, batch: int) -> tuple[Any, Float[Tensor, "batch hidden"]]:
        """A key-value cache of its own for `batch` texts, and the hidden state that predicts the first token."""
        cache, hidden = self._read
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(batch)
        return cache, hidden.expand(batch, -1)

    def append(self, cache: Any, tokens: Int[Tensor, "batch new"]) -> Float[Tensor, "batch hidden"]:
        """Adds one token or more to every text; the hidden state that predicts the next."""
        out = self._lm.model.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)
        return out.last_hidden_state[:, -1]

    @cached_property
    def _read(self) -> tuple[Any, Float[Tensor, "1 hidden"]]:
        with torch.no_grad():
            ids = torch.tensor([self._ids], device=self._lm.device)
            out = self._lm.model.base_model(input_ids=ids, use_cache=True)
        return out.past_key_values, out.last_hidden_state[:, -1]
