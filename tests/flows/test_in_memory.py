"""The stages in memory give what a run gives, for the same recipe, records and model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gradmm
from gradmm.storage.schemas import SCHEMAS
from tests.flows.test_distil import run

#: A seed in place of the system's noise, so that two releases can be equal. Nothing is charged then.
SEEDED = {"epsilon": 4.0, "delta": 1e-5, "declared_records": 200, "unsafe_noise_seed": 1}

WRITTEN = {
    "target_gradient": {
        "space": "public-subspace",
        "subspace_dimensions": 4,
        "centred": True,
        "public_texts": 20,
        "public_text_tokens": 5,
        "probe_share": 0.1,
        "token_share": 0.8,
        "probe_dimensions": 3,
    },
    "word_tilt": {"iterations": 1, "texts": 20},
    "generation": {"method": "written", "loss": "distance"},
    "label_filter": {
        "enabled": True,
        "exemplars": [{"text": "the soup was warm", "label": 1}, {"text": "rude staff", "label": 0}],
    },
}


def as_stored(frame: pd.DataFrame, stage: str) -> pa.Table:
    """Convert a frame as a stage's Parquet would."""
    assert set(frame.columns) == set(SCHEMAS[stage].names)
    return pa.Table.from_pandas(frame, schema=SCHEMAS[stage], preserve_index=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"labelling": {"labels": "hard"}, "loss_selection": {"by": "set"}},
        pytest.param(WRITTEN, marks=pytest.mark.nightly),
        WRITTEN | {"privacy": SEEDED},
        pytest.param(
            WRITTEN | {"privacy": SEEDED, "generation": {"method": "search", "loss": "distance"}},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["search", "set-and-hard-labels", "written", "written-with-noise", "search-with-noise"],
)
def test_the_stages_in_memory_are_those_of_a_run(
    tiny_recipe: Callable[..., gradmm.Recipe], tmp_path: Path, changes: dict[str, Any]
) -> None:
    recipe = tiny_recipe(**changes)
    if recipe.label_filter.enabled:  # a random model and noise would leave no text of a class
        recipe = recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"per_class": 12})})
    record = run(recipe, tmp_path / "root")

    def stored(stage: str) -> pa.Table:
        return pq.read_table(record.stage(stage).path).replace_schema_metadata(None)

    language_model = gradmm.load_language_model(recipe.model)
    splits = gradmm.load_splits(recipe.data, list(recipe.class_names), recipe.seed)
    target = gradmm.target_gradient(language_model, recipe, splits.train)
    assert target.released.rows.equals(stored("target_gradient"))
    assert target.released.figures == record.stage("target_gradient").figures
    if target.space is not None:
        assert target.space.rows.equals(stored("target_space"))
    texts = gradmm.generate(language_model, target)
    assert as_stored(texts, "generation").drop("token_passes").equals(stored("generation").drop("token_passes"))
    assert texts.attrs["distinct_2"] == record.stage("generation").figures["distinct_2"]
    filtered = gradmm.filter_texts(language_model, target, texts)
    assert (
        as_stored(filtered, "category_balance")
        .drop("token_passes")
        .equals(stored("category_balance").drop("token_passes"))
    )
    assert filtered.attrs == record.stage("category_balance").figures
    labelled = gradmm.label(language_model, target, filtered)
    assert as_stored(labelled, "labelling").drop("token_passes").equals(stored("labelling").drop("token_passes"))
    assert labelled.attrs == record.stage("labelling").figures
    audit = gradmm.audit(language_model, target, labelled, splits.train, splits.validation)
    assert as_stored(audit.membership, "mia_audit").equals(stored("mia_audit"))
    assert as_stored(audit.memorisation, "memorisation").equals(stored("memorisation"))
    assert audit.figures["membership"] == record.stage("mia_audit").figures
