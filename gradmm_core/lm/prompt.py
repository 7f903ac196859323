"""Prompt cache: an instruction, read once, that any number of texts continue."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel


def line_end(instruction: str) -> str:
    """Return the line ends of an instruction, which separate the texts that follow it."""
    return instruction[len(instruction.rstrip("\n")) :] or "\n"


def with_examples(instruction: str, texts: Iterable[str]) -> str:
    """Append texts to an instruction, each with the line ends of the instruction."""
    end = line_end(instruction)
    return instruction.rstrip("\n") + end + "".join(text + end for text in texts)


def prompt_ids(language_model: LanguageModel, instruction: str) -> list[int]:
    """Return the token ids of an instruction as a text's beginning, after the model's prefix."""
    return [*language_model.prefix_ids, *language_model.encode(instruction)]


class PromptCache:
    """Key-value cache of an instruction, to be continued token by token."""

    def __init__(self, language_model: LanguageModel, instruction: str) -> None:
        self._lm = language_model
        self._ids = prompt_ids(language_model, instruction)
        if not self._ids:
            raise InputError(f"the instruction {instruction!r} has no tokens", "classes", "write one with words")

    def check_room(self, tokens: int, where: str) -> None:
        """Raise an InputError if `tokens` tokens after the instruction exceed the model's positions."""
        self._lm.check_fits(len(self._ids) + tokens, f"an instruction with a text of {tokens} tokens", where)

    def begin(self, batch: int) -> tuple[Any, Float[Tensor, "batch hidden"]]:
        """Return a new key-value cache for `batch` texts, and the hidden state that predicts the first token."""
        cache, hidden = self._read
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(batch)
        return cache, hidden.expand(batch, -1)

    def append(self, cache: Any, tokens: Int[Tensor, "batch new"]) -> Float[Tensor, "batch hidden"]:
        """Append one or more tokens to every text; return the hidden state that predicts the next."""
        return self.states(cache, tokens)[:, -1]

    def states(self, cache: Any, tokens: Int[Tensor, "batch new"]) -> Float[Tensor, "batch new hidden"]:
        """Append tokens to every text; return the hidden state after each of them."""
        out = self._lm.model.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)
        return out.last_hidden_state

    @cached_property
    def _read(self) -> tuple[Any, Float[Tensor, "1 hidden"]]:
        with torch.no_grad():
            ids = torch.tensor([self._ids], device=self._lm.device)
            out = self._lm.model.base_model(input_ids=ids, use_cache=True)
        return out.past_key_values, out.last_hidden_state[:, -1]
