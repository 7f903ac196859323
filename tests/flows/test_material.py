"""The whole job on real data and a real model, cut down to seconds."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from gradmm.config.loading import load_recipe
from gradmm.config.recipe import Recipe
from gradmm.deployments.recipe_files import find_recipe
from gradmm.flows.distil import distil
from gradmm.outputs.record import RunRecord

SMALL = [
    "data.max_per_class=100",
    "data.validation_rows=100",
    "target_gradient.public_texts=40",
    "target_gradient.public_text_tokens=12",
    "generation.per_class=4",
    "generation.search.draws=6",
    "generation.search.rounds=2",
    "generation.search.edits=8",
    "generation.admm.iterations=3",
    "generation.admm.inner_steps=5",
    "generation.text_tokens=12",
    "loss_selection.per_class=3",
    "category_balance.floor=2",
    "finetune_eval.steps=6",
    "finetune_eval.learning_rates=[3e-5]",
    "finetune_eval.seeds=[0]",
    "finetune_eval.max_validation_rows=50",
    "finetune_eval.max_test_rows=50",
    "word_tilt.texts=30",
    "word_tilt.iterations=1",
    "label_filter.enabled=false",
    "mechanism_audit.draws=400",
    "mechanism_audit.canaries=20",
    "mechanism_audit.guesses=10",
    "mia_audit.runs=2",
    "mia_audit.threshold_records=5",
    "mia_audit.test_records=5",
]


def run(recipe: str, material: Path, root: Path, *changes: str) -> RunRecord:
    overrides = [
        f"data.path={material}/data/{recipe.removesuffix('_six')}",
        f"model.name={material}/models/reviews-phi-9m",
        *SMALL,
        *changes,
    ]
    loaded = load_recipe(find_recipe(recipe), overrides)
    record = distil(**{name: getattr(loaded, name) for name in Recipe.model_fields}, root=root)
    assert isinstance(record, RunRecord)
    return record


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.material
@pytest.mark.parametrize(
    ("recipe", "changes", "classes"),
    [
        ("sst2", ["privacy.epsilon=0.5"], 2),
        (
            "tweet_emotions_six",
            ["data.validation_split=null", "data.test_split=validation", "generation.method=admm"],
            6,
        ),
    ],
)
def test_a_recipe_runs_on_real_data(
    material: Path, tmp_path: Path, recipe: str, changes: list[str], classes: int
) -> None:
    if "privacy.epsilon=0.5" in changes:  # a private run must not choose its records
        changes = [*changes, "data.max_per_class=null", "data.min_words=46"]
    record = run(recipe, material, tmp_path, *changes)
    texts = record.stage("labelling").read()
    assert texts["written_for"].nunique() == classes
    assert min(len(text.split()) for text in texts["text"]) > 1
    if "generation.method=admm" in changes:
        assert texts["matching_loss"].between(0, 1.5).all()
    else:
        assert texts["matching_loss"].isna().all()
    figures = record.stage("finetune_eval").figures
    assert 0 <= figures["accuracy_synthetic"] <= 1
    release = next(tmp_path.glob("runs/*/release/data/*.parquet"))
    assert pd.read_parquet(release)["text"].tolist() == texts["text"].tolist()
    private = set(
        pd.read_parquet(material / "data" / recipe.removesuffix("_six") / "train.parquet")["text"].str.strip()
    )
    assert not private & set(texts["text"])
