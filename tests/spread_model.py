"""A tiny model with layers enough to be spread over several devices, and limits of their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.integrations import accelerate

from gradmm.config.settings import ModelSettings
from gradmm.lm import loading
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import load_language_model
from tests.conftest import tiny_language_model


def in_memory(tokenizer: PreTrainedTokenizerFast, folder: Path, family: str, dtype: str) -> LanguageModel:
    """Save a model of six layers in `folder`, and load it on the CPU."""
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 6}
    tiny_language_model(tokenizer, family, dtype=torch.float32, **layers).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_language_model(ModelSettings.model_validate({"name": str(folder), "dtype": dtype}), "cpu")


def limit_memory(monkeypatch: pytest.MonkeyPatch, sizes: dict[int | str, int]) -> None:
    """Have accelerate use at most these bytes of GPUs, by number, and of "cpu"; other weights stay on the disk."""
    monkeypatch.setattr(accelerate, "get_max_memory", lambda *_: dict(sizes))
    loading._load.cache_clear()
