"""Models that are spread over several devices: here memory and disk, since not every machine has GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from gradmm.errors import InputError
from gradmm.evaluation.trainable import trainable_model
from gradmm.gradients.head_gradient import head_gradients
from gradmm.lm import loading
from gradmm.lm.classification import class_losses
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt import PromptCache
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import make_batch, tokenise_template
from tests.spread_model import in_memory, limit_memory

FAMILIES = ("phi", "llama", "gpt2", "opt")
TEXTS = [[5, 9, 23, 7], [8, 40]]


@pytest.fixture(params=[(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")])
def both(
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[LanguageModel, LanguageModel]:
    """A model in memory, and the same with layers on the disk."""
    whole = in_memory(tokenizer, tmp_path, *request.param)
    limit_memory(monkeypatch, {"cpu": whole.weight_bytes * 2 // 3})
    assert whole.reference is not None
    spread = load_language_model(whole.reference, "balanced")
    assert spread.device_map == "balanced"
    assert {each.is_meta for each in spread.model.parameters()} == {False, True}
    assert spread.bytes_on_device < whole.bytes_on_device == whole.weight_bytes == spread.weight_bytes
    return whole, spread


def test_a_spread_model_computes_the_same(
    both: tuple[LanguageModel, LanguageModel], prompt_template: PromptTemplate
) -> None:
    whole, spread = both
    template = tokenise_template(whole, prompt_template)
    batch = make_batch(template, TEXTS, [1, 0], whole.device)
    gradients = [head_gradients(each, batch).materialise() for each in both]
    assert torch.equal(*gradients)
    assert torch.equal(whole.head, spread.head)
    layers = zip(whole.layers(batch.input_ids), spread.layers(batch.input_ids), strict=True)
    assert all(torch.equal(one, other) for one, other in layers)
    embeds = [each.embed(batch.input_ids).requires_grad_() for each in both]
    for model, inputs in zip(both, embeds, strict=True):
        model.hidden_states(inputs_embeds=inputs).square().sum().backward()
    assert embeds[0].grad is not None
    assert embeds[1].grad is not None
    assert torch.equal(embeds[0].grad, embeds[1].grad)


def test_a_spread_model_reads_its_cache_of_keys_and_values(both: tuple[LanguageModel, LanguageModel]) -> None:
    prompts = [PromptCache(model, "Write a review:") for model in both]
    caches, hidden = zip(*(prompt.begin(2) for prompt in prompts), strict=True)
    assert torch.equal(*hidden)
    for ids in (torch.tensor([[5], [9]]), torch.tensor([[23], [7]])):
        assert torch.equal(*(prompt.append(cache, ids) for prompt, cache in zip(prompts, caches, strict=True)))


def test_adapters_of_a_spread_model_are_trained_alike(
    both: tuple[LanguageModel, LanguageModel], prompt_template: PromptTemplate
) -> None:
    whole, _ = both
    assert whole.reference is not None
    template = tokenise_template(whole, prompt_template)
    trained: list[list[nn.Parameter]] = []
    drawn: list[Tensor] = []
    for frozen in both:
        model = trainable_model(whole.reference, whole.tokenizer, frozen.placement, 3, seed=0)
        adapters = [each for each in model.model.parameters() if each.requires_grad]
        before = [each.any().item() for each in adapters]
        assert before == [False, True, *[True, False] * (len(adapters) // 2 - 1)]  # of the embeddings A is zero
        for mine, same in zip(adapters, drawn or adapters, strict=True):
            mine.data.copy_(same.data)
        drawn = drawn or [each.detach().clone() for each in adapters]
        optimizer = torch.optim.SGD(adapters, lr=0.1)
        for _ in range(3):
            class_losses(model, template, TEXTS, torch.tensor([[0.2, 0.8], [1.0, 0.0]])).sum().backward()
            optimizer.step()
        trained.append(adapters)
    assert all(each.any() for each in trained[0])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


def test_weights_on_the_disk_are_not_trained_themselves(
    both: tuple[LanguageModel, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = both
    assert whole.reference is not None
    limit_memory(monkeypatch, {"cpu": 4 * sum(each.numel() for each in whole.model.parameters()) * 2 // 3})
    with pytest.raises(InputError, match=r"some weights do not fit .* set finetune_eval.lora_rank=64"):
        trainable_model(whole.reference, whole.tokenizer, "balanced", None, seed=0)


def test_embeddings_have_to_be_in_memory(tiny_model: ModelReference, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, {"cpu": 1})
    with pytest.raises(InputError, match=r"^model.device: the embeddings .* do not fit into memory"):
        load_language_model(tiny_model, "sequential")


def test_a_weight_on_the_disk_that_is_not_finite_is_found(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_memory(tokenizer, tmp_path, "llama", "float32")
    model.model.base_model.layers[-1].mlp.down_proj.weight[0, 0] = float("nan")
    model.model.save_pretrained(tmp_path)
    limit_memory(monkeypatch, {"cpu": model.weight_bytes * 2 // 3})
    with pytest.raises(InputError, match=r"NaN or infinite weights in model.layers.5.mlp.down_proj.weight"):
        load_language_model(str(tmp_path), "balanced")


def test_accelerate_has_to_be_installed(tiny_model: ModelReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    loading._load.cache_clear()
    with pytest.raises(InputError, match=r"^model.device: accelerate is not installed; .*'gradmm\[lora\]'"):
        load_language_model(tiny_model, "balanced")
