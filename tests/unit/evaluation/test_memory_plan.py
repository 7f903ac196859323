"""The memory plan against what fine-tuning holds; `benchmarks/rehearsal.py` holds it against whole processes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from gradmm.config.loading import validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.errors import InputError
from gradmm.evaluation import memory_plan as module
from gradmm.evaluation.memory_plan import LIBRARIES, finetuning_bytes, memory_plan
from gradmm.evaluation.trainable import trainable_model
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import load_language_model, read_pretrained
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_template
from tests.conftest import tiny_language_model
from tests.spread_model import in_memory, limit_memory
from tests.unit.evaluation.test_trainable import CPU, FAMILIES, RANK, saved

STAGES = ["target_space", "target_gradient", "generation", "labelling", "finetune_eval", "mia_audit"]


def recipe(**blocks: Any) -> Recipe:
    classes = [
        {"label": 0, "name": "bad", "verbaliser": " bad", "instruction": "a bad day :\n"},
        {"label": 1, "name": "good", "verbaliser": " good", "instruction": "a good day :\n"},
    ]
    values = {"name": "plan", "data": {"path": "data"}, "classes": classes, "model": {"name": "model"}}
    return validate_recipe(values | blocks, where="test")


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_available_bytes", lambda _: 2**50)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fine_tuning_takes_weights_gradients_and_moments(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, family: str
) -> None:
    reference, whole = saved(tokenizer, tmp_path, family, "bfloat16")
    for rank in (None, RANK):
        parameters = list(trainable_model(reference, tokenizer, CPU, rank, seed=0).model.parameters())
        held = sum(each.nbytes for each in parameters)
        held += 3 * sum(each.nbytes for each in parameters if each.requires_grad)
        assert finetuning_bytes(whole, rank) == held


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt_neox", "mixtral"])
def test_every_stage_holds_the_model_and_fine_tunings_what_they_train(
    tokenizer: PreTrainedTokenizerFast, template: TokenisedTemplate, family: str, dtype: torch.dtype
) -> None:
    model = tiny_language_model(tokenizer, family, dtype=dtype)
    plan = memory_plan(recipe(), model, template)
    assert list(plan.stages) == STAGES
    assert plan.weights == model.weight_bytes
    head = model.head.nbytes if model.head.data_ptr() != model.model.lm_head.weight.data_ptr() else 0
    assert min(plan.stages.values()) > LIBRARIES + plan.weights + head
    trained = finetuning_bytes(model, None)
    assert min(plan.stages["finetune_eval"], plan.stages["mia_audit"]) > LIBRARIES + plan.weights + head + trained


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("batch", "texts", "tokens", "workers"), [(1, 1, 2, 1), (64, 100, 20, 3), (200, 400, 30, 2)]
)
def test_a_stage_grows_with_the_settings_that_it_is_told_to_reduce(
    phi: LanguageModel, template: TokenisedTemplate, batch: int, texts: int, tokens: int, workers: int
) -> None:
    def stages(times: int, many: int = 1, **generation: object) -> dict[str, int]:
        made = {"batch_size": times * texts, "per_class": 1000, "text_tokens": tokens, **generation}
        blocks = {
            "target_gradient": {"batch_size": times * batch},
            "labelling": {"batch_size": times * batch},
            "generation": made,
            "execution": {"runner": "processes", "workers": many * workers},
        }
        return memory_plan(recipe(**blocks), phi, template).stages

    one, twice, spread = stages(1), stages(2), stages(1, many=2)
    assert one["target_gradient"] < twice["target_gradient"]
    assert one["labelling"] < twice["labelling"]
    assert one["generation"] < twice["generation"] or texts >= 256  # more are not written together
    # The run's own process, and each worker with a model of its own.
    at_rest = 2 * one["generation"] - spread["generation"]
    assert at_rest == 2 * one["finetune_eval"] - spread["finetune_eval"] > LIBRARIES
    assert one["finetune_eval"] == at_rest + workers * one["mia_audit"]
    assert spread["mia_audit"] == one["mia_audit"]
    assert stages(1, method="search", loss="cosine")["generation"] >= one["generation"]


@pytest.mark.usefixtures("roomy")
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not list mapped files")
@pytest.mark.parametrize("rank", [None, RANK])
def test_workers_share_weights_that_need_no_conversion(
    tokenizer: PreTrainedTokenizerFast, template: TokenisedTemplate, tmp_path: Path, rank: int | None
) -> None:
    """A worker holds them once to write texts, and twice to fine-tune adapters."""
    reference, _ = saved(tokenizer, tmp_path, "phi", "float32")
    workers = {"execution": {"runner": "processes", "workers": 3}, "finetune_eval": {"lora_rank": rank}}
    converted = reference.model_copy(update={"dtype": "bfloat16"})
    for each, mapped in ((reference, True), (converted, False)):
        model = LanguageModel(read_pretrained(each, "cpu"), tokenizer)
        alone = memory_plan(recipe(finetune_eval=workers["finetune_eval"]), model, template).stages
        together = memory_plan(recipe(**workers), model, template).stages
        at_rest = LIBRARIES + module.BYTES_PER_SPELLING * len(model.embeddings) + model.weight_bytes
        at_rest += model.head.nbytes if model.head.data_ptr() != model.model.lm_head.weight.data_ptr() else 0
        shared = model.weight_bytes * mapped
        assert together["generation"] == at_rest + 3 * (alone["generation"] - shared)
        copies = 1 if rank is None else 2
        assert together["finetune_eval"] == at_rest + 3 * (alone["finetune_eval"] - copies * shared)
        del model


@pytest.mark.parametrize(
    ("execution", "gpus", "expected"),
    [
        ({"runner": "in-process"}, 0, 1),
        ({"runner": "processes"}, 0, 1),
        ({"runner": "processes", "workers": 3}, 0, 3),
        ({"runner": "dask"}, 0, 16),
        ({"runner": "ray", "workers": 2}, 0, 2),
        ({"runner": "ray", "address": "ray://elsewhere:10001"}, 0, 1),
        ({"runner": "processes"}, 8, 1),
        ({"runner": "processes", "workers": 8}, 8, 1),
        ({"runner": "processes", "workers": 9}, 8, 2),
    ],
)
def test_workers_that_share_a_memory_are_counted(
    monkeypatch: pytest.MonkeyPatch, execution: dict[str, Any], gpus: int, expected: int
) -> None:
    monkeypatch.setattr(module.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    device = torch.device("cuda" if gpus else "cpu")
    assert module._workers(recipe(execution=execution).execution, device) == expected


@pytest.mark.usefixtures("roomy")
def test_a_fine_tuning_with_soft_labels_holds_a_row_for_each_beginning_of_a_response(
    phi: LanguageModel,
) -> None:
    """Verbalisers of several tokens begin differently, so a text is read once for each of them."""
    verbalisers = {0: " bad chairs", 1: " good bread"}
    template = tokenise_template(
        phi, PromptTemplate(suffix=" It was", verbalisers=verbalisers, max_text_tokens=64)
    )
    assert len({template.tail(label) for label in (0, 1)}) == 2
    soft, hard = (memory_plan(recipe(labelling={"labels": labels}), phi, template) for labels in ("soft", "hard"))
    trained = finetuning_bytes(phi, None)
    beside = [plan.stages["mia_audit"] - LIBRARIES - trained - phi.weight_bytes for plan in (soft, hard)]
    assert beside[0] > 1.3 * beside[1]


def test_a_large_model_does_not_stay_beside_the_one_that_is_trained(
    phi: LanguageModel, template: TokenisedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = memory_plan(recipe(), phi, template).stages
    monkeypatch.setattr(module, "LARGE_MODEL", phi.weight_bytes - 1)
    large = memory_plan(recipe(), phi, template).stages
    frozen = phi.weight_bytes + phi.head.nbytes
    assert {stage: small[stage] - large[stage] for stage in STAGES} == {
        stage: frozen if stage in ("finetune_eval", "mia_audit") else 0 for stage in STAGES
    }


@pytest.mark.parametrize(
    ("blocks", "short_of", "fix"),
    [
        ({}, "finetune_eval", r"set finetune_eval.lora_rank=2 \(\d+\.\d GiB\)$"),
        (
            {"execution": {"runner": "processes", "workers": 3}, "finetune_eval": {"lora_rank": 2}},
            "finetune_eval",
            r"set execution.workers=1 \(",
        ),
        ({"labelling": {"batch_size": 2**20}}, "labelling", r"set labelling.batch_size=\d+ \("),
        ({"target_gradient": {"batch_size": 2**20}}, "target_space", r"set target_gradient.batch_size=\d+ \("),
        (
            {"generation": {"method": "search", "loss": "cosine", "batch_size": 1}},
            "generation",
            r"use a smaller model, or one in bfloat16 \(model.dtype\)$",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    phi: LanguageModel,
    template: TokenisedTemplate,
    monkeypatch: pytest.MonkeyPatch,
    blocks: dict[str, Any],
    short_of: str,
    fix: str,
) -> None:
    # Sizes of this model tell nothing in GiB: its trained numbers and its logits count a thousandfold. Adapters of
    # the suggested rank have more weights than all of it.
    monkeypatch.setattr(module, "SUGGESTED_RANK", 2)
    monkeypatch.setattr(module, "LIBRARIES", 0)
    monkeypatch.setattr(module, "BYTES_PER_TRAINED", 16 * 2**16)
    monkeypatch.setattr(module, "SCORES", 16 * 2**20)
    monkeypatch.setattr(module, "_available_bytes", lambda _: 2**60)
    needed = memory_plan(recipe(**blocks), phi, template).stages[short_of]
    monkeypatch.setattr(module, "_available_bytes", lambda _: needed - 1)
    plan = memory_plan if short_of == "target_space" else _from(short_of)
    with pytest.raises(InputError, match=fix) as refused:
        plan(recipe(**blocks), phi, template)
    assert refused.value.where == short_of
    problem = re.match(r"takes (\d+\.\d) GiB of memory with a model of 0 million parameters", refused.value.what)
    assert problem is not None
    assert float(problem[1]) == round(needed / 2**30, 1)


def _from(stage: str) -> Any:
    """The plan of a recipe whose other stages fit."""

    def plan(*arguments: Any) -> Any:
        whole = module._stages

        def only(*inputs: Any) -> dict[str, int]:
            return {stage: whole(*inputs)[stage]}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_stages", only)
            return memory_plan(*arguments)

    return plan


def test_what_is_available_is_what_the_process_has_and_what_is_free_within_a_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(module, "CONTAINER_LIMIT", tmp_path / "memory.max")
    own = psutil.Process().memory_info().rss
    assert module._available_bytes(CPU) == pytest.approx(own + 1000, rel=0.1)
    (tmp_path / "memory.max").write_text("max\n")
    assert module._available_bytes(CPU) == pytest.approx(own + 1000, rel=0.1)
    (tmp_path / "memory.max").write_text("4096\n")
    assert module._available_bytes(CPU) == 4096


@pytest.mark.usefixtures("roomy")
def test_of_a_spread_model_what_is_on_its_first_device_counts(
    tokenizer: PreTrainedTokenizerFast,
    template: TokenisedTemplate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = in_memory(tokenizer, tmp_path, "phi", "bfloat16")
    limit_memory(monkeypatch, {"cpu": whole.weight_bytes * 2 // 3})
    assert whole.reference is not None
    spread = load_language_model(whole.reference, "balanced")
    elsewhere = whole.weight_bytes - spread.bytes_on_device
    assert elsewhere > 0
    adapted = recipe(finetune_eval={"lora_rank": 2})
    one, other = (memory_plan(adapted, each, template).stages for each in (whole, spread))
    assert {one[stage] - other[stage] for stage in ("target_gradient", "generation", "labelling")} == {elsewhere}
    assert one["mia_audit"] - other["mia_audit"] > elsewhere  # the trained copy is spread too
    with pytest.raises(InputError, match="some weights do not fit on the devices, and all are to be trained"):
        memory_plan(recipe(), spread, template)
