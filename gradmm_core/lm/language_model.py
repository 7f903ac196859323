"""Hugging Face causal language models, split into embeddings, body and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gradmm.config.settings import ModelSettings
from gradmm.errors import InputError
from gradmm.lm.bfloat16_product import FrozenProduct
from gradmm.lm.last_mlp import last_mlp, layers_of, only_last
from gradmm.lm.model_reference import ModelReference, resolve_model, unusable_model
from gradmm.storage.hub import hub_or_its_cache


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Embeddings E (vocab x hidden), a body, and a linear head W (vocab x hidden) with or without bias.

    The body runs in the model's dtype, the head in at least float32. Weights are frozen.

    Attributes:
        reference: the files that it was loaded from; None if it was made in memory.
    """

    model: Any
    tokenizer: Any
    reference: ModelReference | None = None

    @property
    def device(self) -> torch.device:
        return self.embeddings.device

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
    def embeddings(self) -> Float[Tensor, "vocab hidden"]:
        return self.model.get_input_embeddings().weight

    @cached_property
    def head(self) -> Float[Tensor, "vocab width"]:
        """W~: a frozen copy of the head's weight, with the bias, if any, as an additional column."""
        output = self.model.get_output_embeddings()
        weight = output.weight.detach()
        if getattr(output, "bias", None) is not None:
            weight = torch.cat([weight, output.bias.detach()[:, None]], dim=1)
        return weight.to(self.head_dtype)

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
        return last_mlp(self.model.base_model, self.probe)

    @property
    def probe(self) -> Int[Tensor, "1 tokens"]:
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


def load_language_model(
    model: ModelReference | ModelSettings | str, device: str | None = None, attention: str | None = None
) -> LanguageModel:
    """Load, freeze and check a model. Keep it in memory for the next call in this process.

    Args:
        model: a folder or hub id, the block `model` of a recipe, or a reference by digest.
        device: auto, cpu, cuda, cuda:0, ... Default: that of the recipe's block, else auto.
        attention: "eager" for second derivatives (the full-gradient ablation). None: the fastest.

    Raises:
        InputError: if the model cannot be loaded, has weights that are not finite, or its logits are not
            head(hidden), which invalidates the closed form.
    """
    if isinstance(model, str):
        model = ModelSettings(name=model)
    if isinstance(model, ModelSettings):
        device, model = device or model.device, resolve_model(model)
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _load(model, device, attention or fastest_attention(device))


#: Bytes of weights, from which on a frozen model is not kept beside one that is trained.
LARGE_MODEL = 2**30


def forget_large_model(language_model: LanguageModel) -> None:
    """Do not keep a large model for the next call of `load_language_model`, to make room for a trained one."""
    if language_model.weight_bytes > LARGE_MODEL:
        _load.cache_clear()


@lru_cache(maxsize=1)  # memory for one model
def _load(reference: ModelReference, device: str, attention: str) -> LanguageModel:
    model = read_pretrained(reference, device, attention)
    language_model = LanguageModel(model.eval().requires_grad_(False), _read_tokenizer(reference), reference)
    check_model(language_model, reference.name)
    check_tokenizer(language_model, reference.name)
    return language_model


def fastest_attention(device: str) -> str:
    """Return the fused kernel for a GPU. On a CPU it takes twice as long for sentences in bfloat16."""
    return "eager" if device == "cpu" else "sdpa"


def read_pretrained(reference: ModelReference, device: str, attention: str | None = None) -> Any:
    """Load a new, trainable copy of the weights. See `load_language_model` for the frozen, shared one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading is fast
    try:
        with _source_in_reach(reference):
            model = AutoModelForCausalLM.from_pretrained(
                reference.source,
                revision=reference.revision or "main",
                dtype=getattr(torch, reference.dtype),
                attn_implementation=attention or fastest_attention(device),
                trust_remote_code=reference.trust_remote_code,
                use_safetensors=True,
            )
    except Exception as error:  # files from elsewhere can cause any error
        raise unusable_model(reference.name, error) from error
    _fuse_activations(model)
    try:
        return model.to(device)  # pyright: ignore[reportArgumentType]  (a decorator hides its signature)
    except (RuntimeError, AssertionError) as error:
        problem = f"{device!r} cannot be used ({str(error).partition(chr(10))[0]})"
        raise InputError(problem, "model.device", "set 'auto', 'cpu' or an available device") from error


def _fuse_activations(model: nn.Module) -> None:
    """Replace transformers' tanh GELU (eight kernels) by torch's (one)."""
    from transformers.activations import NewGELUActivation

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def _read_tokenizer(reference: ModelReference) -> Any:
    from transformers import AutoTokenizer

    try:
        with _source_in_reach(reference):
            return AutoTokenizer.from_pretrained(
                reference.source,
                revision=reference.revision or "main",
                trust_remote_code=reference.trust_remote_code,
            )
    except Exception as error:  # tokenizers raises plain Exception
        raise unusable_model(reference.name, error) from error


def _source_in_reach(reference: ModelReference) -> AbstractContextManager[None]:
    return hub_or_its_cache() if reference.revision else nullcontext()


@torch.no_grad()
def check_model(language_model: LanguageModel, name: str) -> None:
    """Check on a short input that head(body(x)) equals the model's logits, from ids and from embeddings.

    Raises:
        InputError: if weights or logits are not finite, the logits are post-processed (capped, scaled), the head
            is not a linear map, or embeddings and ids give different results.
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
    linear = language_model.logits(language_model.augment(hidden))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(language_model.body_dtype, 3e-2)
    checks = {
        "post-processes its logits (capped or scaled)": (logits, head_output),
        "changes the body's output before the head": (head_input, hidden),
        "has a head that is not a linear map": (head_output, linear),
        "treats embeddings unlike their tokens": (by_embedding, hidden),
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
    """Raise an InputError if the tokenizer has tokens, for example added ones, without an embedding."""
    largest, rows = max(language_model.tokenizer.get_vocab().values()), language_model.embeddings.shape[0]
    if largest >= rows:
        problem = f"the tokenizer of {name!r} has a token {largest}, but the model only {rows} embeddings"
        raise InputError(problem, "model.name", "resize the model's embeddings, or remove the token")


def _agree(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.double(), expected.double()
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def _find(sequence: list[int], part: list[int]) -> int | None:
    return next((i for i in range(len(sequence)) if sequence[i : i + len(part)] == part), None)
