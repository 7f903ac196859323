"""Compute cost of a method, in token passes through the model's body."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor

from gradmm.lm.language_model import LanguageModel


@dataclass
class ComputeMeter:
    """Count all calls of the model while the context is active.

    `forward_tokens`: tokens that passed through the body, without cached ones. `backward_tokens`: tokens that
    gradients passed through. A backward pass costs about two forward passes.
    """

    language_model: LanguageModel
    forward_tokens: int = 0
    backward_tokens: int = 0

    @property
    def token_passes(self) -> int:
        """Total cost, in forward passes of one token."""
        return self.forward_tokens + 2 * self.backward_tokens

    def __enter__(self) -> ComputeMeter:
        self._entered = True
        self._handle = self.language_model.model.base_model.register_forward_hook(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        self._handle.remove()

    def _count(self, module: Any, inputs: Any, output: Any) -> None:
        hidden: Tensor = output.last_hidden_state
        tokens = hidden.shape[0] * hidden.shape[1]
        self.forward_tokens += tokens
        if hidden.requires_grad:

            def count_backward(_: Tensor) -> None:
                if self._entered:
                    self.backward_tokens += tokens

            hidden.register_hook(count_backward)
