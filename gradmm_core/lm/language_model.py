"""Hugging Face causal language models, split into embeddings, body and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradmm.errors import InputError
from gradmm.lm.bfloat16_product import FrozenProduct
from gradmm.lm.last_mlp import last_mlp, layers_of, only_last
from gradmm.lm.model_reference import ModelReference


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Embeddings E (vocab x hidden), a body, and a linear head W (vocab x hidden) with or without bias.

    The body runs in the model's dtype, the head in at least float32. Weights are frozen.

    Attributes:
        reference: the files that it was loaded from; None if it was made in memory.
        device_map: how its weights are spread over devices (`DEVICE_MAPS`); None: all are on `device`. Inputs and
            outputs are on `device` in both cases.
    """

    model: Any
    tokenizer: Any
    reference: ModelReference | None = None
    device_map: str | None = None

    @property
    def device(self) -> torch.device:
        return self.embeddings.device

    @property
    def placement(self) -> torch.device | str:
        """Where to load another copy of the model."""
        return self.device_map or self.device

    @property
    def body_dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    @cached_property
    def head_dtype(self) -> torch.dtype:
        """The body's dtype, or float32 if that has less precision."""
        return torch.promote_types(self.body_dtype, torch.float32)

    @property
    def weight_bytes(self) -> int:
        return sum(each.nbytes for each in self.model.parameters())

    @property
    def bytes_on_device(self) -> int:
        """Bytes of the weights that are on `device`."""
        return sum(each.nbytes for each in self.model.parameters() if each.device == self.device)

    @property
    def embeddings(self) -> Float[Tensor, "vocab hidden"]:
        return self.model.get_input_embeddings().weight

    @cached_property
    def head(self) -> Float[Tensor, "vocab width"]:
        """W~: a frozen copy of the head's weight, with the bias, if any, as an additional column."""
        weight, bias = self.head_weights()
        if bias is not None:
            weight = torch.cat([weight, bias[:, None]], dim=1)
        return weight.detach().to(self.head_dtype)

    def head_weights(self) -> tuple[Float[Tensor, "vocab hidden"], Float[Tensor, " vocab"] | None]:
        """Return the head's current weight and bias, on `device`, in the dtype that they have."""
        output = self.model.get_output_embeddings()
        with read_from_disk(output):
            weight, bias = output.weight, getattr(output, "bias", None)
        return weight.to(self.device), None if bias is None else bias.to(self.device)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Special tokens that the tokenizer puts before every text (beginning of sequence, or none)."""
        with_specials = self.tokenizer("a")["input_ids"]
        without = self.encode("a")
        begin = _find(with_specials, without)
        if begin is None:
            raise InputError(
                "its tokenizer splits a text differently with special tokens",
                "model.name",
                "use a model whose tokenizer puts them around the text",
            )
        return tuple(with_specials[:begin])

    @property
    def positions(self) -> int | None:
        """The largest number of tokens of an input; None if the model states none."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def coupling(self) -> str | None:
        """Why a text's hidden states could depend on the batch's other texts; None if nothing is known to do so.

        A router distributes the tokens of a batch among experts, and quantised layers may choose how to round the
        inputs from the whole batch.
        """
        if any("experts" in name for name, _ in self.model.named_modules()):
            return "the model is a mixture of experts"
        return "the model's weights are quantised" if getattr(self.model, "is_quantized", False) else None

    def check_fits(self, tokens: int, what: str, where: str) -> None:
        """Raise an InputError if an input of `tokens` tokens exceeds the model's positions."""
        positions = self.positions
        if positions is not None and tokens > positions:
            problem = f"{what} takes {tokens} tokens, but the model has {positions} positions"
            raise InputError(problem, where, f"shorten it by {tokens - positions} tokens, or use another model")

    def encode(self, text: str) -> list[int]:
        """Tokenise a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def embed(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Look up rows of E, in the body's dtype."""
        return nn.functional.embedding(ids, self.embeddings)

    def embed_freely(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Look up rows of E in the head's dtype, the dtype for optimising embeddings."""
        return self.embed(ids).to(self.head_dtype)

    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch tokens"] | None = None,
        inputs_embeds: Float[Tensor, "batch tokens hidden"] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Compute the last hidden states. Attention is causal, so right padding does not affect earlier positions.

        Args:
            last: compute only the last n positions; earlier outputs are undefined.
        """
        with only_last(self._last_mlp, last) if last and self._last_mlp else nullcontext():
            out = self.model.base_model(input_ids=input_ids, inputs_embeds=inputs_embeds, use_cache=False)
        return out.last_hidden_state

    def layers(
        self,
        input_ids: Int[Tensor, "batch tokens"] | None = None,
        inputs_embeds: Float[Tensor, "batch tokens hidden"] | None = None,
    ) -> tuple[
        Float[Tensor, "batch tokens first"],
        Float[Tensor, "batch tokens middle"],
        Float[Tensor, "batch tokens last"],
    ]:
        """Compute the hidden states before the first layer, of the middle layer and of the last, in one pass."""
        out = self.model.base_model(
            input_ids=input_ids, inputs_embeds=inputs_embeds, use_cache=False, output_hidden_states=True
        )
        states = out.hidden_states
        return states[0], states[len(states) // 2], out.last_hidden_state

    @contextmanager
    def compiled_layers(self) -> Iterator[None]:
        """Run the body's layers compiled by torch.compile while the context is active.

        Layers of one kind share their code, so that compiling takes as long as for one or two of them. The first
        pass of a shape compiles it, and from a second shape on the sizes may vary. Do not nest.
        """
        layers = layers_of(self.model.base_model)
        for layer, forward in zip(layers, self._compiled_forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    @cached_property
    def _compiled_forwards(self) -> list[Callable[..., Any]]:
        return [torch.compile(layer.forward) for layer in layers_of(self.model.base_model)]

    @cached_property
    def _last_mlp(self) -> nn.Module | None:
        return last_mlp(self.model.base_model, self.sample_ids)

    @property
    def sample_ids(self) -> Int[Tensor, "1 tokens"]:
        """A short input for checks of the model."""
        return torch.arange(1, 9, device=self.device)[None] % self.embeddings.shape[0]

    def augment(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        """Return h~ in the head's dtype: h, with a one appended if the head has a bias."""
        hidden = hidden.to(self.head_dtype)
        if self.head.shape[1] == hidden.shape[-1]:
            return hidden
        return torch.cat([hidden, hidden.new_ones(*hidden.shape[:-1], 1)], dim=-1)

    def logits(self, augmented: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """Compute W~ h~."""
        return augmented @ self.head.mT

    @cached_property
    def head_product(self) -> FrozenProduct:
        """W~ h~ in bfloat16 arithmetic for a bfloat16 body, which has already rounded h~."""
        return FrozenProduct(self.head, self.body_dtype)


@contextmanager
def read_from_disk(module: nn.Module) -> Iterator[None]:
    """Have a module's own weights in memory while the context is active, if accelerate keeps them elsewhere."""
    if not hasattr(module, "_hf_hook"):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


def _find(sequence: list[int], part: list[int]) -> int | None:
    return next((i for i in range(len(sequence)) if sequence[i : i + len(part)] == part), None)
