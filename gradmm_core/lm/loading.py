"""Loading and checking of Hugging Face causal language models, on one device or spread over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from gradmm.config.extras import check_installed
from gradmm.config.settings import DEVICE_MAPS, ModelSettings
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel, read_from_disk
from gradmm.lm.model_reference import ModelReference, resolve_model, unusable_model
from gradmm.storage.hub import hub_or_its_cache


def load_language_model(
    model: ModelReference | ModelSettings | str, device: str | None = None, attention: str | None = None
) -> LanguageModel:
    """Load, freeze and check a model. Keep it in memory for the next call in this process.

    Args:
        model: a folder or hub id, the block `model` of a recipe, or a reference by digest.
        device: auto, cpu, cuda, cuda:0, ..., or one of `DEVICE_MAPS`. Default: that of a recipe, or auto.
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
    tokenizer = _read_tokenizer(reference)
    language_model = LanguageModel(model.eval().requires_grad_(False), tokenizer, reference, device_map_of(device))
    check_model(language_model, reference.name)
    check_tokenizer(language_model, reference.name)
    return language_model


def device_map_of(device: str) -> str | None:
    """Return how `device` spreads a model over several devices; None if it names one."""
    return device if device in DEVICE_MAPS else None


def fastest_attention(device: str) -> str:
    """Return the fused kernel for a GPU. On a CPU it takes twice as long for sentences in bfloat16."""
    on_cpu = device == "cpu" or (device_map_of(device) and not torch.cuda.is_available())
    return "eager" if on_cpu else "sdpa"


def read_pretrained(reference: ModelReference, device: str, attention: str | None = None) -> Any:
    """Load a new, trainable copy of the weights. See `load_language_model` for the frozen, shared one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if device_map := device_map_of(device):
        check_installed("accelerate", "lora", "model.device")
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
                device_map=device_map,
            )
    except Exception as error:  # files from elsewhere can cause any error
        raise unusable_model(reference.name, error) from error
    _fuse_activations(model)
    if device_map:
        return _with_outputs_on_one_device(model, reference.name)
    try:
        return model.to(device)  # pyright: ignore[reportArgumentType]  (a decorator hides its signature)
    except (RuntimeError, AssertionError) as error:
        problem = f"{device!r} cannot be used ({str(error).partition(chr(10))[0]})"
        fix = "set 'auto', 'cpu' or an available device, or spread the model over several ('balanced')"
        raise InputError(problem, "model.device", fix) from error


def _with_outputs_on_one_device(model: Any, name: str) -> Any:
    """Have the body and the head of a model that is spread give their outputs where the embeddings are.

    Raises:
        InputError: if the embeddings are not in memory.
    """
    from accelerate.utils import send_to_device

    embeddings = model.get_input_embeddings().weight
    if embeddings.is_meta:
        problem = f"the embeddings of {name!r} do not fit into memory"
        raise InputError(problem, "model.device", "use a machine with more memory")
    move = partial(send_to_device, device=embeddings.device, skip_keys="past_key_values")
    for module in (model.base_model, model.get_output_embeddings()):
        module.register_forward_hook(lambda _module, _inputs, output: move(output))
    return model


def _named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        with read_from_disk(module):
            yield from module.named_parameters(prefix, recurse=False)


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
    broken = next((name for name, weight in _named_weights(model) if not weight.isfinite().all()), None)
    if broken is not None:
        raise InputError(f"{name!r} has NaN or infinite weights in {broken}", "model.name", "repair the model")
    ids = language_model.sample_ids
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, output: seen.append((inputs[0], output))
    )
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    if not logits.isfinite().all():
        fix = "set model.dtype=float32" if language_model.body_dtype == torch.float16 else "repair the model"
        raise InputError(f"{name!r} gives NaN or infinite logits", "model.name", fix)
    head_input, head_output = seen[0]
    hidden = language_model.hidden_states(input_ids=ids)
    by_embedding = language_model.hidden_states(inputs_embeds=language_model.embed(ids))
    linear = language_model.logits(language_model.augment(hidden))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(language_model.body_dtype, 3e-2)
    checks = {
        "post-processes its logits (capped or scaled)": (logits.to(head_output.device), head_output),
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
