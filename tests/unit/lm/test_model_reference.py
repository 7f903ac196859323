from __future__ import annotations

from pathlib import Path

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
