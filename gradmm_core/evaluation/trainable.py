"""Load a model for fine-tuning, of all parameters or of LoRA adapters only, and compute the memory it needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel, read_pretrained
from gradmm.lm.model_reference import ModelReference

#: Factor of an adapter's product, alpha / rank in the paper's terms.
LORA_SCALE = 2

#: Rank that is suggested where fine-tuning all parameters does not fit.
SUGGESTED_RANK = 16

#: Bytes for each trained number: itself, its gradient and Adam's two moments, all in float32.
BYTES_PER_TRAINED = 16


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
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in _linear_layers(model)),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)  # freezes all other parameters
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return LanguageModel(model.eval(), tokenizer)


def check_lora_is_installed(lora_rank: int | None) -> None:
    """Raise an InputError if adapters are asked for and their package is missing."""
    if lora_rank is None:
        return
    try:
        import peft  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed", "finetune_eval.lora_rank", "pip install 'gradmm[lora]'"
        ) from error


class MemoryPlan(NamedTuple):
    """Bytes on the model's device: its weights, the fine-tunings beside it, and what is free for these."""

    parameters: int
    weights: int
    finetuning: int
    free: int


def memory_plan(language_model: LanguageModel, lora_rank: int | None, at_once: int = 1) -> MemoryPlan:
    """Compute what fine-tunings of a model take, and check that it fits in the memory that is free beside it.

    Activations are not counted: they take less than the weights, unless texts are very long.

    Args:
        at_once: fine-tunings that share the device.

    Raises:
        InputError: if they do not fit.
    """
    plan = MemoryPlan(
        parameters=sum(each.numel() for each in language_model.model.parameters()),
        weights=_weight_bytes(language_model),
        finetuning=at_once * finetuning_bytes(language_model, lora_rank),
        free=_free_bytes(language_model.device),
    )
    if plan.finetuning > plan.free:
        what = "adapters" if lora_rank else "all parameters"
        problem = (
            f"fine-tuning {what} of a model of {plan.parameters / 1e6:,.0f} million takes "
            f"{plan.finetuning / 2**30:.1f} GiB of memory"
            + (f" in {at_once} processes" if at_once > 1 else "")
            + f", and {plan.free / 2**30:.1f} GiB are free"
        )
        smaller = at_once * finetuning_bytes(language_model, SUGGESTED_RANK) / 2**30
        fixes = [f"set finetune_eval.lora_rank={SUGGESTED_RANK} ({smaller:.1f} GiB)"] if lora_rank is None else []
        fixes += ["execution.workers=1"] if at_once > 1 else []
        raise InputError(problem, "finetune_eval", ", or ".join([*fixes, "use a smaller model"]))
    return plan


def finetuning_bytes(language_model: LanguageModel, lora_rank: int | None) -> int:
    """Compute the bytes of one fine-tuning's weights, gradients and moments."""
    if lora_rank is None:
        return BYTES_PER_TRAINED * sum(each.numel() for each in language_model.model.parameters())
    trained = sum(lora_rank * sum(layer.weight.shape) for layer in _linear_layers(language_model.model))
    return _weight_bytes(language_model) + BYTES_PER_TRAINED * trained


def _weight_bytes(language_model: LanguageModel) -> int:
    return sum(each.nbytes for each in language_model.model.parameters())


def _linear_layers(model: Any) -> list[nn.Linear | Conv1D]:
    """Return the body's, those that get adapters; Conv1D is GPT-2's, whose weight is transposed."""
    return [layer for layer in model.base_model.modules() if isinstance(layer, nn.Linear | Conv1D)]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
