from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradmm.config.settings import ModelSettings
from gradmm.lm.model_reference import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    return tmp_path


def digest(folder: Path) -> str:
    return resolve_model(ModelSettings(name=str(folder))).digest


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "LICENSE.txt", "NOTICE", ".gitattributes", "curve.png"])
def test_documentation_does_not_change_a_models_digest(folder: Path, name: str) -> None:
    """A private target under another key would be charged to the ledger once more."""
    before = digest(folder)
    (folder / name).write_text("for people")
    assert digest(folder) == before
    (folder / name).write_text("for other people")
    assert digest(folder) == before


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "modeling_x.py",
    ],
)
def test_every_other_file_changes_it(folder: Path, name: str) -> None:
    before = digest(folder)
    (folder / name).write_text("another")
    assert digest(folder) != before


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "bfloat16"),  # as transformers before 4.56 wrote it
        ({"dtype": "float32"}, "float32"),
        ({}, "float32"),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ("config", "float32"),
    ],
)
def test_weights_stored_in_half_precision_are_loaded_in_bfloat16(folder: Path, config: Any, dtype: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert resolve_model(ModelSettings(name=str(folder))).dtype == dtype
    assert resolve_model(ModelSettings(name=str(folder), dtype="float32")).dtype == "float32"
