"""Run the most important checks of the CPU tests on a GPU. Machines without one skip them.

`pytest tests/unit/test_on_gpu.py`
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from gradmm.config.settings import (
    FinetuneEvalSettings,
    ModelSettings,
)
from gradmm.data.examples import Examples
from gradmm.evaluation.finetune_eval import Finetuning
from gradmm.evaluation.peak_memory import peak_memory
from gradmm.evaluation.schedule import Schedule
from gradmm.evaluation.trainable import trainable_model
from gradmm.generation.objectives import HeadMatching
from gradmm.generation.parts_that_fit import in_parts_that_fit
from gradmm.generation.shards import Shard
from gradmm.gradients.head_gradient import head_gradients
from gradmm.lm.bfloat16_product import TOLERANCE, FrozenProduct
from gradmm.lm.classification import class_logits, class_losses
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, make_batch, tokenise_template
from tests.conftest import tiny_language_model
from tests.spread_model import in_memory, limit_memory
from tests.unit.generation.test_generation import as_written, texts
from tests.unit.gradients.test_head_gradient import autograd_head_gradient
from tests.unit.lm.test_bfloat16_product import check_losses_of_hidden_states
from tests.unit.target.test_record_batches import FAMILIES, check_bits, check_sensitivity

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = "cuda"


def on_gpu(tokenizer: PreTrainedTokenizerFast, family: str, dtype: torch.dtype) -> LanguageModel:
    return LanguageModel(tiny_language_model(tokenizer, family, dtype=dtype).model.to(GPU), tokenizer)


def test_products_in_float32_are_not_rounded_further() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=random).to(GPU) for _ in range(2))
    exact = left.double() @ right.double()
    assert (left @ right - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("family", ["phi", "llama", "gpt2", "opt"])
def test_losses_and_their_gradients_equal_double_backward(
    tokenizer: PreTrainedTokenizerFast,
    prompt_template: PromptTemplate,
    family: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    model = on_gpu(tokenizer, family, dtype)
    template = tokenise_template(model, prompt_template)
    random = torch.Generator().manual_seed(1)
    target = torch.randn(model.head.shape, generator=random).to(model.head)
    x = (0.2 * torch.randn(3, 5, model.embeddings.shape[1], generator=random)).to(model.head).requires_grad_(True)
    ours = HeadMatching(model, template, 1, target)(x)
    (our_slope,) = torch.autograd.grad(ours.sum(), x)
    tail = model.embed(torch.tensor(template.tail(1), device=GPU))[None]
    for i in range(len(x)):
        example = x[i : i + 1].detach().requires_grad_(True)
        embeds = torch.cat([example, tail], dim=1)
        g = autograd_head_gradient(model, embeds, list(template.responses[1]), create_graph=True)
        plain = 1 - F.cosine_similarity(g.flatten(), target.flatten(), dim=0)
        (slope,) = torch.autograd.grad(plain, example)
        assert float((plain - ours[i]).detach().abs()) < tolerance
        assert float((slope[0] - our_slope[i]).abs().max()) < tolerance * max(1.0, float(slope.abs().max()))


@pytest.mark.filterwarnings("default")  # torch warns of its own code while it compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_give_the_same_losses_and_gradients(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate, dtype: torch.dtype
) -> None:
    model = on_gpu(tokenizer, "phi", dtype)
    template = tokenise_template(model, prompt_template)
    random = torch.Generator().manual_seed(1)
    target = torch.randn(model.head.shape, generator=random).to(GPU)
    x = model.embed_freely(torch.randint(len(model.embeddings), (6, 5), generator=random).to(GPU))
    x.requires_grad_(True)
    plain, compiled = (HeadMatching(model, template, 1, target, compile_layers=each)(x) for each in (False, True))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert (plain - compiled).abs().max() < tolerance
    slopes = [torch.autograd.grad(losses.sum(), [x])[0] for losses in (plain, compiled)]
    assert (slopes[0] - slopes[1]).norm() < 10 * tolerance * slopes[0].norm()


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_two_bfloat16_products_are_nearly_as_accurate_as_one_in_float32(rows: int) -> None:
    random = torch.Generator().manual_seed(0)
    h = (3 * torch.randn(rows, 1, 2048, generator=random)).bfloat16().float().to(GPU)
    matrix = torch.randn(5000, 2048, generator=random).bfloat16().float().to(GPU)
    exact = h.double() @ matrix.double().mT
    product = FrozenProduct(matrix, torch.bfloat16)
    assert product._half is not None
    assert (product(h) - exact).abs().max() < TOLERANCE * exact.abs().max()


def test_a_bfloat16_body_has_the_matching_losses_of_its_hidden_states(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate
) -> None:
    model = on_gpu(tokenizer, "phi", torch.bfloat16)
    check_losses_of_hidden_states(model, tokenise_template(model, prompt_template))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_other_records_change_no_bit_of_a_records_vector(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate, family: str, dtype: torch.dtype, rows: int
) -> None:
    check_bits(on_gpu(tokenizer, family, dtype), prompt_template, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_no_record_moves_the_sums_by_more_than_the_sensitivity(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate, dtype: torch.dtype, sampler: str
) -> None:
    check_sensitivity(on_gpu(tokenizer, "phi", dtype), prompt_template, "public-subspace", sampler)


def test_record_gradients_equal_the_cpus(
    tokenizer: PreTrainedTokenizerFast, prompt_template: PromptTemplate
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-3)):
        cpu, gpu = tiny_language_model(tokenizer, "phi", dtype=dtype), on_gpu(tokenizer, "phi", dtype)
        template = tokenise_template(cpu, prompt_template)
        ids = [cpu.encode(text) for text in ("the soup was cold", "a quiet room with good light", "late")]
        there = head_gradients(gpu, make_batch(template, ids, [0, 1, 1], gpu.device)).materialise().cpu()
        here = head_gradients(cpu, make_batch(template, ids, [0, 1, 1], cpu.device)).materialise()
        assert (there - here).abs().max() < tolerance * here.abs().max()


def texts_of(
    model: LanguageModel, template: TokenisedTemplate, method: str, shard: Shard, batch_size: int = 100
) -> pd.DataFrame:
    if method == "written":
        return as_written(model, template, shard, batch_size)
    return texts(model, template, shard, method=method, batch_size=batch_size)


@pytest.mark.parametrize("method", ["written", "search", "admm"])
def test_texts_are_those_of_the_cpu(
    tokenizer: PreTrainedTokenizerFast, template: TokenisedTemplate, method: str
) -> None:
    cpu, gpu = tiny_language_model(tokenizer, "phi"), on_gpu(tokenizer, "phi", torch.float64)
    here, there = (texts_of(model, template, method, Shard(1, 0, 0, 8)) for model in (cpu, gpu))
    assert here["text"].tolist() == there["text"].tolist()
    np.testing.assert_allclose(here["matching_loss"], there["matching_loss"], atol=1e-6)


@pytest.mark.parametrize("method", ["written", "search", "admm"])
def test_shards_and_batches_change_no_text(
    tokenizer: PreTrainedTokenizerFast, template: TokenisedTemplate, method: str
) -> None:
    gpu = on_gpu(tokenizer, "phi", torch.float32)
    whole = texts_of(gpu, template, method, Shard(1, 0, 0, 8))
    parts = [texts_of(gpu, template, method, Shard(1, 0, start, 4), batch_size=2) for start in (0, 4)]
    assert whole["text"].tolist() == pd.concat(parts)["text"].tolist()


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_fine_tuning_learns_what_it_learns_on_the_cpu(
    tiny_model: ModelReference, prompt_template: PromptTemplate, lora_rank: int | None
) -> None:
    labels = [i % 2 for i in range(60)]
    examples = Examples([[70 + label] + [100 + i % 7] * (i % 5) for i, label in enumerate(labels)], labels)
    answers = []
    for device in ("cpu", GPU):
        model = load_language_model(tiny_model, device)
        template = tokenise_template(model, prompt_template)
        settings = FinetuneEvalSettings(batch_size=20, lora_rank=lora_rank)
        finetuning = Finetuning(tiny_model, model.tokenizer, model.device, template, settings)
        tuned = finetuning.finetune(examples, Schedule(3e-3, 20), seed=3)
        answers.append(class_logits(tuned, template, examples.texts, batch_size=64).log_softmax(dim=1).cpu())
    # Adam turns rounding errors of parameters that hardly matter into full steps.
    assert (answers[0] - answers[1]).abs().max() < 0.05
    if lora_rank is None:
        assert (answers[1].argmax(dim=1) == torch.tensor(labels)).double().mean() > 0.9


@pytest.mark.parametrize("family", ["phi", "llama", "gpt2", "opt"])
def test_layers_in_memory_compute_what_they_compute_on_the_gpu(
    tokenizer: PreTrainedTokenizerFast,
    prompt_template: PromptTemplate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    whole = in_memory(tokenizer, tmp_path, family, "float32")
    limit_memory(monkeypatch, {0: whole.weight_bytes * 2 // 3, "cpu": 2**30})
    template = tokenise_template(whole, prompt_template)
    texts = [[5, 9, 23, 7], [8, 40]]
    gradients, answers = [], []
    for device in (GPU, "balanced"):
        model = load_language_model(str(tmp_path), device)
        assert model.device.type == "cuda"
        gradients.append(head_gradients(model, make_batch(template, texts, [1, 0], model.device)).materialise())
        assert model.reference is not None
        adapted = trainable_model(model.reference, tokenizer, model.placement, 2, seed=0)
        class_losses(adapted, template, texts, torch.tensor([[0.2, 0.8], [1.0, 0.0]])).sum().backward()
        assert all(each.grad is not None for each in adapted.model.parameters() if each.requires_grad)
        answers.append(class_logits(adapted, template, texts, batch_size=2).cpu())
    assert model.bytes_on_device < whole.weight_bytes
    assert (gradients[0] - gradients[1]).abs().max() < 1e-4 * gradients[0].abs().max()
    assert (answers[0] - answers[1]).abs().max() < 1e-4


def test_peak_memory_counts_what_is_on_the_gpu() -> None:
    with peak_memory() as peak:
        room = torch.empty(2**28, dtype=torch.uint8, device=GPU)
        del room
    assert peak.gpu is not None
    assert 2**28 <= peak.gpu < 2**30


def test_work_that_does_not_fit_on_the_gpu_is_halved() -> None:
    free = torch.cuda.mem_get_info()[0]

    def work(numbers: range) -> int:
        torch.empty(free // 3 * len(numbers), dtype=torch.uint8, device=GPU)
        return len(numbers)

    assert sum(in_parts_that_fit(work, range(8))) == 8


def test_auto_is_the_gpu(tiny_model: ModelReference) -> None:
    assert load_language_model(tiny_model).device.type == "cuda"
    assert load_language_model(tiny_model).model.config._attn_implementation == "sdpa"
    assert ModelSettings(name=tiny_model.name).device == "auto"
