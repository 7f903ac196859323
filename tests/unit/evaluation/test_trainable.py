"""Adapters against a plain loop with parametrised weights."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from gradmm.config.settings import FinetuneEvalSettings, ModelSettings
from gradmm.data.examples import HeldOut
from gradmm.errors import InputError
from gradmm.evaluation.finetune_eval import Finetuning, epoch_batches, evaluate_arm, summarise
from gradmm.evaluation.schedule import Schedule
from gradmm.evaluation.trainable import trainable_model
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import ModelReference, resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import tokenise_template
from tests.conftest import tiny_language_model
from tests.unit.evaluation.test_finetune_eval import separable

RANK = 3
CPU = torch.device("cpu")
FAMILIES = ("phi", "llama", "gpt2", "opt")


def saved(
    tokenizer: PreTrainedTokenizerFast, folder: Path, family: str, dtype: str = "float32"
) -> tuple[ModelReference, LanguageModel]:
    """A tiny model of a family as a reference, and loaded."""
    tiny_language_model(tokenizer, family, dtype=torch.float32).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = ModelSettings.model_validate({"name": str(folder), "dtype": dtype})
    return resolve_model(settings), load_language_model(settings, "cpu")


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def factor_name(layer: str, factor: str) -> str:
    """Return peft's name of a layer's A or B."""
    if layer.endswith("embed_tokens"):
        return f"model.{layer}.lora_embedding_{factor}.default"
    return f"model.{layer}.lora_{factor}.default.weight"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_change_nothing_before_training_and_are_all_that_is_trained(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, family: str, dtype: str
) -> None:
    reference, whole = saved(tokenizer, tmp_path, family, dtype)
    model = trainable_model(reference, tokenizer, CPU, RANK, seed=0)
    ids = torch.arange(1, 12)[None]
    assert torch.equal(model.hidden_states(input_ids=ids), whole.hidden_states(input_ids=ids))
    parameters = dict(model.model.named_parameters())
    assert {name for name, each in parameters.items() if each.requires_grad} == set(filter(is_adapter, parameters))
    assert {each.dtype for name, each in parameters.items() if is_adapter(name)} == {torch.float32}
    assert {each.dtype for name, each in parameters.items() if not is_adapter(name)} == {getattr(torch, dtype)}
    # A and B of every linear layer of the body, and of the embeddings.
    linear = [each for each in whole.model.base_model.modules() if isinstance(each, nn.Linear | Conv1D)]
    assert sum(map(is_adapter, parameters)) == 2 * (len(linear) + 1) > 8


class Low(nn.Module):
    """W + scale B A, as a parametrisation of W; its transpose for embeddings."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, transposed: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.scale, self.transposed = scale, transposed

    def forward(self, weight: Tensor) -> Tensor:
        product = self.scale * self.b @ self.a
        return weight + (product.mT if self.transposed else product)


def test_training_is_adam_with_warmup_linear_decay_and_clipping_on_the_factors(
    tokenizer: PreTrainedTokenizerFast,
    prompt_template: PromptTemplate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plain loop: weights parametrised, rows one by one, unfused Adam, a manually set learning rate."""
    monkeypatch.setattr("gradmm.evaluation.finetune_eval.reduced_precision_products", nullcontext)
    reference, plain = saved(tokenizer, tmp_path, "phi")
    template = tokenise_template(plain, prompt_template)
    settings = FinetuneEvalSettings(batch_size=5, lora_rank=RANK)
    finetuning = Finetuning(reference, tokenizer, CPU, template, settings)
    begun = dict(finetuning.fresh_model(seed=3).model.named_parameters())
    trained: dict[str, Low] = {}
    for name, layer in plain.model.base_model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            embeds = isinstance(layer, nn.Embedding)
            factors = (begun[factor_name(name, factor)].detach().clone() for factor in "AB")
            trained[name] = Low(*factors, scale=2 / RANK**0.5 if embeds else 2, transposed=embeds)
            parametrize.register_parametrization(layer, "weight", trained[name])
    examples = separable(12)
    parameters = [each for low in trained.values() for each in (low.a, low.b)]
    optimizer = torch.optim.Adam(parameters, lr=0.0)
    norms = []
    for step, rows in enumerate(epoch_batches(12, 5, 20, seed=3)):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(step / 2, (20 - step) / 18)
        optimizer.zero_grad()
        losses = []
        for row in rows:
            response = list(template.responses[examples.labels[row]])
            ids = [*examples.texts[row], *template.suffix, *response]
            logits = plain.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -len(response) - 1 : -1]
            losses.append(nn.functional.cross_entropy(logits, torch.tensor(response)))
        torch.stack(losses).mean().backward()
        gradients = [each.grad for each in parameters if each.grad is not None]
        norms.append(torch.cat([each.flatten() for each in gradients]).norm().item())
        for gradient in gradients:
            gradient /= max(norms[-1], 1)
        optimizer.step()
    assert min(norms) > 1
    tuned = dict(finetuning.finetune(examples, Schedule(5e-3, 20), seed=3).model.named_parameters())
    for name, low in trained.items():
        for factor, expected in (("A", low.a), ("B", low.b)):
            full_name = factor_name(name, factor)
            change, wanted = tuned[full_name] - begun[full_name], expected - begun[full_name]
            # Adam makes full steps of rounding errors where a gradient is nearly zero, as those of q and k are.
            if not name.endswith(("q_proj", "k_proj")):
                torch.testing.assert_close(change, wanted, rtol=0.02, atol=1e-4)
            assert wanted.abs().max() > 1e-3, full_name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_learn_what_the_texts_teach_whatever_is_drawn_elsewhere(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate, tmp_path: Path, dtype: str
) -> None:
    reference, whole = saved(tokenizer, tmp_path, "llama", dtype)
    settings = {"steps": 30, "evaluate_every": 30, "learning_rates": (2e-2,), "seeds": (0, 1), "lora_rank": RANK}
    template = tokenise_template(whole, prompt_template)

    def trained(**changes: object) -> pd.DataFrame:
        chosen = FinetuneEvalSettings.model_validate(settings | changes)
        unseen = separable(40, first=1000)
        finetuning = Finetuning(reference, tokenizer, CPU, template, chosen)
        return evaluate_arm(finetuning, "right", separable(40), HeldOut(unseen, unseen))

    frame = trained()
    assert summarise(frame)["accuracy_right"] == 1.0
    with torch.random.fork_rng():
        torch.manual_seed(5)
        again = trained(seeds=(0,))
    assert again.equals(frame[frame["seed"] == 0])
    losses = frame.groupby("seed")["loss"].first()
    assert losses[0] != losses[1]


def test_a_missing_package_is_told_in_one_line(
    tiny_model: ModelReference, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"finetune_eval.lora_rank: peft is not installed; .*'gradmm\[lora\]'"):
        trainable_model(tiny_model, tokenizer, CPU, RANK, seed=0)
