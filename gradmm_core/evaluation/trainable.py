"""Load a model for fine-tuning, of all parameters or of LoRA adapters only."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel, read_pretrained
from gradmm.lm.model_reference import ModelReference

#: Factor of an adapter's product, alpha / rank in the paper's terms.
LORA_SCALE = 2


def trainable_model(
    reference: ModelReference, tokenizer: Any, device: torch.device, lora_rank: int | None, seed: int
) -> LanguageModel:
    """Load a model with weights of its own, of which those that a fine-tuning trains require gradients.

    Args:
        lora_rank: None trains all parameters, in float32. Otherwise W becomes W + 2 B A in each linear layer of
            the body (LoRA, Hu et al. 2021): W stays as it is, in the reference's dtype, and A (rank x inputs) and
            B (outputs x rank) are trained in float32. B begins at zero, so the model is the same before training.
        seed: draws the adapters' A.
    """
    if lora_rank is None:
        reference = reference.model_copy(update={"dtype": "float32"})
        return LanguageModel(read_pretrained(reference, str(device)), tokenizer)
    check_lora_is_installed(lora_rank)
    from peft import LoraConfig, inject_adapter_in_model

    model = read_pretrained(reference, str(device))
    config = LoraConfig(
        r=lora_rank,
        lora_alpha=LORA_SCALE * lora_rank,
        target_modules="all-linear",
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in model.base_model.modules()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)  # freezes all other parameters
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return LanguageModel(model.eval(), tokenizer)


def check_lora_is_installed(lora_rank: int | None, where: str = "finetune_eval.lora_rank") -> None:
    """Raise an InputError that names `where` if adapters are asked for there and their package is missing."""
    if lora_rank is None:
        return
    try:
        import peft  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", where, "pip install 'gradmm[lora]'") from error
