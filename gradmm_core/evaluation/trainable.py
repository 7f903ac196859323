"""Load a model for fine-tuning, of all parameters or of LoRA adapters only."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gradmm.config.extras import check_installed
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import device_map_of, read_pretrained
from gradmm.lm.model_reference import ModelReference

#: Factor of an adapter's product, alpha / rank in the paper's terms.
LORA_SCALE = 2

#: Rank that is suggested where fine-tuning all parameters does not fit.
SUGGESTED_RANK = 64


def trainable_model(
    reference: ModelReference, tokenizer: Any, placement: torch.device | str, lora_rank: int | None, seed: int
) -> LanguageModel:
    """Load a model with weights of its own, of which those that a fine-tuning trains require gradients.

    Args:
        placement: a device, or one of `DEVICE_MAPS`.
        lora_rank: None trains all parameters, in float32. Otherwise adapters are trained, see `adapted_model`.
        seed: draws the adapters.

    Raises:
        InputError: if a weight to train is offloaded, or if peft is not installed.
    """
    if lora_rank is not None:
        return adapted_model(reference, tokenizer, placement, lora_rank, seed)
    model = read_pretrained(reference.model_copy(update={"dtype": "float32"}), str(placement))
    check_in_memory(model)
    return LanguageModel(model, tokenizer, device_map=device_map_of(str(placement)))


def adapted_model(
    reference: ModelReference,
    tokenizer: Any,
    placement: torch.device | str,
    rank: int,
    seed: int,
    embeddings: bool = True,
) -> LanguageModel:
    """Load a model with adapters of its linear layers and of its embeddings (LoRA, Hu et al. 2021).

    The weight W of a linear layer of the body becomes W + 2 B A, with A (rank x inputs) and B (outputs x rank).
    The embeddings E (vocabulary x width) become E + 2 / sqrt(rank) A^T B^T, with A (rank x vocabulary) and B
    (width x rank): peft draws this B with a variance of 1, and the other A with one of 1 / (3 inputs). W and E
    stay as they are, in the reference's dtype; A and B require gradients, in float32. One of the two begins at
    zero, so the model is the same before training. A head that is tied to E stays as it is.

    Args:
        seed: draws the factors that do not begin at zero.
        embeddings: whether these have an adapter too. Texts whose words the model hardly knows teach less without.

    Raises:
        InputError: if peft is not installed.
    """
    check_installed("peft", "lora", "finetune_eval.lora_rank")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    model = read_pretrained(reference, str(placement))
    adapted = {model.get_input_embeddings()} if embeddings else set()
    of_embeddings = [name for name, layer in model.named_modules() if layer in adapted]
    config = LoraConfig(
        r=rank,
        lora_alpha=LORA_SCALE * rank,
        target_modules=[*linear_layers(model), *of_embeddings],
        alpha_pattern=dict.fromkeys(of_embeddings, LORA_SCALE * rank**0.5),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in model.base_model.modules()),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # It warns that merging adapters would change both tied layers: these are never merged.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True` and a tied layer is part")
        inject_adapter_in_model(config, model)  # freezes all other parameters
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                _place_adapters(layer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return LanguageModel(model.eval(), tokenizer, device_map=device_map_of(str(placement)))


def linear_layers(model: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """Return the body's, by their names in it; Conv1D is GPT-2's, whose weight is transposed."""
    body: nn.Module = model.base_model  # pyright: ignore[reportAssignmentType]
    return {name: layer for name, layer in body.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def _place_adapters(layer: Any) -> None:
    """Have a layer's adapters where it computes. Beside an offloaded weight, peft makes them without values."""
    hook = getattr(layer.get_base_layer(), "_hf_hook", None)
    if hook is None or not hook.offload:
        return
    adapters = (layer.lora_A, layer.lora_B)
    for adapter in adapters:
        adapter.to_empty(device="cpu")
    layer.reset_lora_parameters(*layer.lora_A, init_lora_weights=True)
    for adapter in adapters:
        adapter.to(hook.execution_device)


def check_in_memory(model: Any) -> None:
    """Raise an InputError if weights are offloaded, which cannot be trained: they are read anew for each pass."""
    if any(weight.is_meta for weight in model.parameters()):
        problem = "some weights do not fit on the devices, and all are to be trained"
        where = "finetune_eval.lora_rank"
        raise InputError(problem, where, f"set {where}={SUGGESTED_RANK}, which trains adapters")
