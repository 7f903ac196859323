"""A small recipe that runs the whole flow in a second or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pandas as pd
import pytest

from gradmm.config.loading import validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.flows.ui import artifacts
from gradmm.flows.ui.artifacts import UiArtifacts
from gradmm.lm.model_reference import ModelReference
from gradmm.outputs import plot_style, plots
from tests.conftest import built_once

#: Those that every run has, private or not.
STAGES_OF_THE_PAPER = (
    "target_gradient",
    "generation",
    "label_filter",
    "loss_selection",
    "category_balance",
    "labelling",
    "finetune_eval",
    "mia_audit",
)
GOOD = ("the soup was warm", "fresh bread and good light", "a quiet room , great book", "we liked every page")
BAD = (
    "the train came late",
    "rude staff and cold coffee",
    "a terrible smell again",
    "bad chairs , never again",
)


@pytest.fixture(scope="session", autouse=True)
def prefect_server(session_server: str) -> str:
    """The address of the session's Prefect server, which all flows use."""
    return session_server


@pytest.fixture(scope="module", autouse=True)
def without_plots() -> Iterator[None]:
    """Draw nothing: plots take more than half of a small run. Modules that test plots override this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UiArtifacts, "_plot", lambda *_: "")
        patch.setattr(plots, "described", lambda figure, _: figure)
        patch.setattr(plot_style, "svg", lambda _: "")
        yield


@pytest.fixture(scope="module", autouse=True)
def without_pages() -> Iterator[None]:
    """Publish nothing in the UI, which takes a seventh of a small run. Modules that test pages override this."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("create_markdown", "create_table", "create_progress", "update_progress"):
            patch.setattr(artifacts, f"{kind}_artifact", lambda *_, **__: uuid4())
        yield


@pytest.fixture(scope="session")
def tiny_data(shared_folder: Path) -> Path:
    """40 train rows, 16 validation and test rows, two classes."""
    return built_once(shared_folder / "tiny-data", write_tiny_data)


def write_tiny_data(folder: Path) -> None:
    for split, copies in (("train", 5), ("validation", 2), ("test", 2)):
        rows = [
            {"text": f"{text} {split} {copy}", "label": label}
            for copy in range(copies)
            for label, of_class in enumerate((BAD, GOOD))
            for text in of_class
        ]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def tiny_recipe_values(data: Path, model: ModelReference) -> dict:
    return {
        "name": "tiny",
        "data": {"path": str(data), "validation_split": "validation"},
        "classes": [
            {"label": 0, "name": "bad", "verbaliser": " bad", "instruction": "a bad day :\n"},
            {"label": 1, "name": "good", "verbaliser": " good", "instruction": "a good day :\n"},
        ],
        "model": {"name": model.name},
        # Where nothing but the data decides the target; the tests of the privacy promise have other spaces.
        "target_gradient": {
            "space": "full",
            "centred": False,
            "probe_share": 0,
            "token_share": 0,
            "public_texts": 50,
        },
        "generation": {
            "method": "search",
            "loss": "cosine",
            "per_class": 4,
            "shard_size": 2,
            "text_tokens": 5,
            "search": {"draws": 4, "rounds": 2, "edits": 4},
            "admm": {"iterations": 2, "inner_steps": 2},
            "projection": {"candidates": 20},
        },
        # A random model's opinion would empty a class.
        "label_filter": {"enabled": False},
        "loss_selection": {"per_class": 3},
        "category_balance": {"floor": 2},
        "finetune_eval": {
            "steps": 4,
            "batch_size": 4,
            "evaluate_every": 2,
            "learning_rates": [1e-4],
            "seeds": [0],
        },
        "mechanism_audit": {"draws": 400, "canaries": 20, "guesses": 10},
        "mia_audit": {"runs": 2, "threshold_records": 4, "test_records": 4},
    }


@pytest.fixture
def tiny_recipe(tiny_data: Path, tiny_model: ModelReference) -> Callable[..., Recipe]:
    """The recipe, with blocks changed by keyword: `tiny_recipe(loss_selection={"per_class": 2})`."""

    def build(**changes: dict) -> Recipe:
        values = tiny_recipe_values(tiny_data, tiny_model)
        for block, change in changes.items():
            values[block] = values.get(block, {}) | change if isinstance(change, dict) else change
        return validate_recipe(values, "test")

    return build
