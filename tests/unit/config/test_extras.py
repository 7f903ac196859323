"""Packages that a recipe needs are looked for when it runs, not when it is read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from gradmm.config.extras import check_extras
from gradmm.config.loading import load_recipe, validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.errors import InputError
from tests.unit.config.test_recipe import MINIMAL

NEEDS = (
    ("privacy={epsilon: 0.5, declared_records: 500, sampler: discrete}", "opendp", "privacy.sampler", "discrete"),
    ("finetune_eval.lora_rank=64", "peft", "finetune_eval.lora_rank", "lora"),
    ("model.device=balanced", "accelerate", "model.device", "lora"),
)


@pytest.mark.parametrize(("override", "package", "where", "extra"), NEEDS)
def test_a_package_that_is_missing_is_named_and_the_recipe_can_be_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, package: str, where: str, extra: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(MINIMAL)
    needy = load_recipe(file, [override])
    check_extras(needy)  # the tests have all extras
    monkeypatch.setitem(sys.modules, package, None)
    assert Recipe.model_validate_json(needy.model_dump_json()) == needy
    line = f"{where}: {package} is not installed; pip install 'gradmm[{extra}]'"
    with pytest.raises(InputError, match=re.escape(line)):
        check_extras(needy)


def test_a_recipe_without_such_settings_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, package, *_ in NEEDS:
        monkeypatch.setitem(sys.modules, package, None)
    check_extras(validate_recipe(yaml.safe_load(MINIMAL), "test"))
