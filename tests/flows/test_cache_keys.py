"""The parts of a cache key. Prefect only logs an error raised in one, and runs everything again."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from prefect.context import TaskRunContext

from gradmm.config.settings import DataSettings, GenerationSettings, LossSelectionSettings, TargetGradientSettings
from gradmm.generation.shards import Shard
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import Root
from gradmm.tasks.runtime.stage_task import RunContext, SplitReference, StageCache, stage_key, stage_task

MODEL = ModelReference(name="a/b", revision="c0ffee", digest="c0ffee", dtype="float32", trust_remote_code=False)


def context(root: str = "/one", device: str = "cpu") -> RunContext:
    return RunContext(
        root=Root(path=Path(root)),
        recipe="tiny",
        data=DataSettings(path=root),
        labels=(0, 1),
        seed=0,
        device=device,
    )


def key(**inputs: object) -> str:
    return stage_key("loss_selection", inputs)


def test_the_key_names_stage_and_digest() -> None:
    inputs: dict[str, object] = {"settings": LossSelectionSettings()}
    inputs["context"] = context().for_stage("loss_selection", inputs)
    computed = StageCache("loss_selection").compute_key(TaskRunContext.model_construct(), inputs, {})
    assert computed == f"loss_selection/{stage_key('loss_selection', inputs)}"
    assert stage_key("category_balance", inputs) != stage_key("loss_selection", inputs)


def test_where_and_on_what_a_run_works_does_not_count() -> None:
    assert key(context=context("/one", "cpu")) == key(context=context("/two", "cuda"))
    here = SplitReference(split="train", digest="d", rows=3)
    assert key(train=here) == key(train=here.model_copy(update={"split": "other"}))
    assert key(model=MODEL) == key(model=MODEL.model_copy(update={"name": "/elsewhere"}))


def test_settings_content_and_dtype_count() -> None:
    assert key(settings=LossSelectionSettings(per_class=3)) != key(settings=LossSelectionSettings(per_class=4))
    assert key(model=MODEL) != key(model=MODEL.model_copy(update={"digest": "d"}))
    assert key(model=MODEL) != key(model=MODEL.model_copy(update={"dtype": "bfloat16"}))
    assert key(shard=Shard(0, 0, 0, 5)) != key(shard=Shard(0, 0, 0, 6))
    assert key(seed=0) != key(seed=1)
    assert key(a=1, b=2) != key(a=2, b=1)


def test_the_order_of_classes_counts() -> None:
    """It decides which class gets one text more, and the columns of probabilities."""
    ascending, descending = ({label: f" {label}" for label in labels} for labels in ((2, 10), (10, 2)))
    assert key(instructions=ascending) != key(instructions=descending)
    first, second = (
        PromptTemplate(suffix=" It was", verbalisers=verbalisers, max_text_tokens=8)
        for verbalisers in (ascending, descending)
    )
    assert key(prompt_template=first) != key(prompt_template=second)
    # Figures by name have no order.
    assert key(figures={"b": 1, "a": 2}) == key(figures={"a": 2, "b": 1})


def test_keys_are_those_of_earlier_versions() -> None:
    """Another key of a private target would be another release."""
    template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=8)
    inputs = {
        "prompt_template": template,
        "model": MODEL,
        "settings": TargetGradientSettings(probe_share=0.5, token_share=0.0),
        "clipping_norm": 1.0,
    }
    assert stage_key("target_gradient", inputs) == "7f79a767083f9151a1be12379dae7a60"  # version 4


def test_runtime_settings_do_not_count() -> None:
    assert key(s=TargetGradientSettings(batch_size=1)) == key(s=TargetGradientSettings(batch_size=9))
    assert key(s=GenerationSettings(batch_size=1)) == key(s=GenerationSettings(batch_size=9))


@pytest.mark.parametrize(
    "value", [torch.ones(1), np.ones(1), pd.DataFrame(), {1, 2}, object(), Path("/x"), {"a": {1, 2}}]
)
def test_values_without_a_stable_digest_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be part of a cache key"):
        key(value=value)


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "tasks").rglob("*.py")), ids=lambda file: file.name
)
def test_no_stage_reads_from_the_context_what_decides_its_result(file: Path) -> None:
    """The context is in no key. `inputs` reads the data by it, and checks them against the digest in the key."""
    if file.name == "inputs.py":
        return
    attributes = {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "context"
    }
    assert not attributes & {"labels", "seed", "data"}


def test_a_stage_without_a_key_is_refused() -> None:
    @stage_task("loss_selection")
    def stage(context: RunContext) -> tuple[pd.DataFrame, dict[str, object]]:
        return pd.DataFrame({"text": ["a"]}), {}

    with pytest.raises(ValueError, match="without a cache key"):
        stage.fn(context())
