"""A Hugging Face causal language model, taken apart into embeddings, body and head."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradmm_core.errors import InputError
from gradmm_core.frozen_product import FrozenProduct
from gradmm_core.last_positions import last_mlp, only_last
from gradmm_core.model_reference import ModelReference, unusable_model


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Embeddings E (vocab x hidden), a body, and a linear head W (vocab x hidden) with or without bias.

    The body runs in the model's own dtype; everything from the head on in float32 at least. Weights are frozen.
    """

    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return self.embeddings.device

    @property
    def body_dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    @cached_property
    def head_dtype(self) -> torch.dtype:
        """float64 stays float64 (tests); half precision is lifted to float32."""
        return torch.promote_types(self.body_dtype, torch.float32)

    @property
    def embeddings(self) -> Float[Tensor, "vocab hidden"]:
        return self.model.get_input_embeddings().weight

    @cached_property
    def head(self) -> Float[Tensor, "vocab width"]:
        """W~: the head's weight, with its bias as one more column if there is one. A frozen copy."""
        output = self.model.get_output_embeddings()
        weight = output.weight.detach()
        if getattr(output, "bias", None) is not None:
            weight = torch.cat([weight, output.bias.detach()[:, None]], dim=1)
        return weight.to(self.head_dtype)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts in front of every text (a beginning-of-sequence token, or nothing)."""
        with_specials = self.tokenizer("a")["input_ids"]
        without = self.encode("a")
        begin = _find(with_specials, without)
        if begin is None:
            raise InputError(
                "its tokenizer splits a text otherwise where it adds special tokens",
                "model.name",
                "use a model whose tokenizer puts them around the text",
            )
        return tuple(with_specials[:begin])

    def check_fits(self, tokens: int, what: str, where: str) -> None:
        """Raises an InputError if an input of so many tokens is longer than the model has positions for."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and tokens > positions:
            problem = f"{what} takes {tokens} tokens, and the model has {positions} positions"
            raise InputError(problem, where, f"shorten it by {tokens - positions} tokens, or use another model")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def embed(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Rows of E, in the body's dtype."""
        return nn.functional.embedding(ids, self.embeddings)

    def embed_freely(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Rows of E in the head's dtype: where embeddings that are optimised live."""
        return self.embed(ids).to(self.head_dtype)

    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch tokens"] | None = None,
        inputs_embeds: Float[Tensor, "batch tokens hidden"] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Last hidden states. Attention is causal, so right padding changes nothing before it.

        Args:
            last: only so many at the end are read; those before are not to be.
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
        """Hidden states before the first layer, in the middle, and the last, from one pass.

        In nearly all models they are equally wide.
        """
        out = self.model.base_model(
            input_ids=input_ids, inputs_embeds=inputs_embeds, use_cache=False, output_hidden_states=True
        )
        states = out.hidden_states
        return states[0], states[len(states) // 2], out.last_hidden_state

    @cached_property
    def _last_mlp(self) -> nn.Module | None:
        return last_mlp(self.model.base_model, self.probe)

    @property
    def probe(self) -> Int[Tensor, "1 tokens"]:
        """A few token ids, to try things with."""
        return torch.arange(1, 9, device=self.device)[None] % self.embeddings.shape[0]

    def augment(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        """h~ in the head's dtype: h, with a one appended if the head has a bias."""
        hidden = hidden.to(self.head_dtype)
        if self.head.shape[1] == hidden.shape[-1]:
            return hidden
        return torch.cat([hidden, hidden.new_ones(*hidden.shape[:-1], 1)], dim=-1)

    def logits(self, augmented: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """W~ h~."""
        return augmented @ self.head.mT

    @cached_property
    def head_product(self) -> FrozenProduct:
        """W~ h~ where a body in bfloat16 has rounded h~ already, and where it takes the gradient."""
        return FrozenProduct(self.head, self.body_dtype)


def load_language_model(
    reference: ModelReference, device: str = "auto", attention: str | None = None
) -> LanguageModel:
    """Loads a model, frozen and checked. Kept in memory for the next caller in this process.

    Args:
        attention: "eager" where a second derivative is needed (the full-gradient ablation). None: the fastest.

    Raises:
        InputError: if it cannot be loaded, has weights that are not finite, or its logits are not
            head(hidden), so that the closed form would be wrong.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _load(reference, device, attention or fastest_attention(device))


@lru_cache(maxsize=1)  # one model's memory at a time
def _load(reference: ModelReference, device: str, attention: str) -> LanguageModel:
    model = read_pretrained(reference, device, attention)
    language_model = LanguageModel(model.eval().requires_grad_(False), _read_tokenizer(reference))
    check_model(language_model, reference.name)
    check_tokenizer(language_model, reference.name)
    return language_model


def fastest_attention(device: str) -> str:
    """The fused kernel on a GPU. On a CPU, for texts of sentences' length in bfloat16, it takes twice as long."""
    return "eager" if device == "cpu" else "sdpa"


def read_pretrained(reference: ModelReference, device: str, attention: str | None = None) -> Any:
    """A fresh copy of the weights, trainable; `load_language_model` is the frozen, shared one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading takes no time worth a bar of its own
    try:
        model = AutoModelForCausalLM.from_pretrained(
            reference.source,
            revision=reference.revision or "main",
            dtype=getattr(torch, reference.dtype),
            attn_implementation=attention or fastest_attention(device),
            trust_remote_code=reference.trust_remote_code,
            use_safetensors=True,
        )
    except Exception as error:  # of all that a folder of strangers can make its readers stumble over
        raise unusable_model(reference.name, error) from error
    _fuse_activations(model)
    try:
        return model.to(device)  # pyright: ignore[reportArgumentType]  (a decorator hides its signature)
    except (RuntimeError, AssertionError) as error:
        problem = f"{device!r} cannot be used ({str(error).partition(chr(10))[0]})"
        raise InputError(problem, "model.device", "set 'auto', 'cpu' or a device that is there") from error


def _fuse_activations(model: nn.Module) -> None:
    """Puts torch's one kernel in place of transformers' eight for the same function, GELU by tanh."""
    from transformers.activations import NewGELUActivation

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def _read_tokenizer(reference: ModelReference) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            reference.source,
            revision=reference.revision or "main",
            trust_remote_code=reference.trust_remote_code,
        )
    except Exception as error:  # tokenizers raises no other
        raise unusable_model(reference.name, error) from error


@torch.no_grad()
def check_model(language_model: LanguageModel, name: str) -> None:
    """Proves on a probe that head(body(x)) are the model's logits, from ids and from embeddings.

    Raises:
        InputError: if weights or logits are not finite, the logits are post-processed (capped, scaled), the head
            is not the plain linear map, or feeding embeddings is not the same as feeding ids.
    """
    model = language_model.model
    broken = next((n for n, p in model.named_parameters() if not p.isfinite().all()), None)
    if broken is not None:
        raise InputError(f"{name!r} has NaN or infinite weights in {broken}", "model.name", "repair the model")
    probe = language_model.probe
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, output: seen.append((inputs[0], output))
    )
    try:
        logits = model(input_ids=probe, use_cache=False).logits
    finally:
        hook.remove()
    if not logits.isfinite().all():
        fix = "set model.dtype=float32" if language_model.body_dtype == torch.float16 else "repair the model"
        raise InputError(f"{name!r} gives NaN or infinite logits", "model.name", fix)
    head_input, head_output = seen[0]
    hidden = language_model.hidden_states(input_ids=probe)
    by_embedding = language_model.hidden_states(inputs_embeds=language_model.embed(probe))
    ours = language_model.logits(language_model.augment(hidden))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(language_model.body_dtype, 3e-2)
    checks = {
        "post-processes its logits (capped or scaled)": (logits, head_output),
        "changes the body's output before the head": (head_input, hidden),
        "has a head that is not one linear map": (head_output, ours),
        "treats embeddings unlike the tokens they stand for": (by_embedding, hidden),
    }
    for problem, (actual, expected) in checks.items():
        exact = problem.startswith("post-processes")
        if not _agree(actual, expected, 0.0 if exact else tolerance):
            raise InputError(
                f"{name!r} {problem}, so its head gradient has no closed form",
                "model.name",
                "use a model whose logits are a linear map of its last hidden state",
            )


def check_tokenizer(language_model: LanguageModel, name: str) -> None:
    """Raises an InputError if the tokenizer has tokens, perhaps added ones, that the model cannot embed."""
    largest, rows = max(language_model.tokenizer.get_vocab().values()), language_model.embeddings.shape[0]
    if largest >= rows:
        problem = f"the tokenizer of {name!r} has a token {largest}, and the model {rows} embeddings"
        raise InputError(problem, "model.name", "resize the model's embeddings, or take the token away")


def _agree(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.double(), expected.double()
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def _find(sequence: list[int], part: list[int]) -> int | None:
    return next((i for i in range(len(sequence)) if sequence[i : i + len(part)] == part), None)
