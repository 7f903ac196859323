"""Load a model for fine-tuning, of all parameters or of LoRA adapters only."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from gradmm.config.extras import check_installed
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import device_map_of, read_pretrained
from gradmm.lm.model_reference import ModelReference

#: Factor of an adapter's product, alpha / rank in the paper's terms.
LORA_SCALE = 2

#: Rank that is suggested where fine-tuning all parameters does not fit.
SUGGESTED_RANK = 16


def trainable_model(
    reference: ModelReference, tokenizer: Any, placement: torch.device | str, lora_rank: int | None, seed: int
) -> LanguageModel:
    """Load a model with weights of its own, of which those that a fine-tuning trains require gradients.

    Args:
        placement: a device, or one of `DEVICE_MAPS`.
        lora_rank: None trains all parameters, in float32. Otherwise W becomes W + 2 B A in each linear layer of
            the body (LoRA, Hu et al. 2021): W stays as it is, in the reference's dtype, and A (rank x inputs) and
            B (outputs x rank) are trained in float32. B begins at zero, so the model is the same before training.
        seed: draws the adapters' A.

    Raises:
        InputError: if a weight to train is offloaded, or if peft is not installed.
    """
    device_map = device_map_of(str(placement))
    if lora_rank is None:
        reference = reference.model_copy(update={"dtype": "float32"})
        model = read_pretrained(reference, str(placement))
        check_in_memory(model)
        return LanguageModel(model, tokenizer, device_map=device_map)
    check_installed("peft", "lora", "finetune_eval.lora_rank")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    model = read_pretrained(reference, str(placement))
    config = LoraConfig(
        r=lora_rank,
        lora_alpha=LORA_SCALE * lora_rank,
        target_modules="all-linear",
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in model.base_model.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)  # freezes all other parameters
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                _place_adapters(layer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return LanguageModel(model.eval(), tokenizer, device_map=device_map)


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
