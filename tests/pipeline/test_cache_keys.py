"""What a cache key is made of. Prefect only logs an error in it, and runs everything again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from gradmm_core.artifacts import Root
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import DataSettings, GenerationSettings, LossSelectionSettings, TargetGradientSettings
from gradmm_core.shards import Shard
from tasks.stage import RunContext, SplitReference, StageCache, stage_key

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
    inputs = {"context": context(), "settings": LossSelectionSettings()}
    computed = StageCache("loss_selection").compute_key(None, inputs, {})  # type: ignore[arg-type]
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


def test_runtime_settings_do_not_count() -> None:
    assert key(s=TargetGradientSettings(batch_size=1)) == key(s=TargetGradientSettings(batch_size=9))
    assert key(s=GenerationSettings(batch_size=1)) == key(s=GenerationSettings(batch_size=9))


@pytest.mark.parametrize(
    "value", [torch.ones(1), np.ones(1), pd.DataFrame(), {1, 2}, object(), Path("/x"), {"a": {1, 2}}]
)
def test_values_without_a_stable_digest_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be part of a cache key"):
        key(value=value)
