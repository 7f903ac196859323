"""The recipes and presets that come with the product, and those of the user."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from gradmm_core.errors import InputError

RECIPES, PRESETS = (Path(__file__).parent / folder for folder in ("recipes", "presets"))


def recipe_names() -> list[str]:
    """Names of the recipes that come with the product."""
    return _names(RECIPES)


def preset_names() -> list[str]:
    """Names of the presets that come with the product."""
    return _names(PRESETS)


def find_recipe(name: str) -> Path:
    """The file of a recipe: one that comes with the product, by its name, or a path to a YAML file.

    Raises:
        InputError: if there is neither.
    """
    return _find(name, RECIPES, "recipe", "RECIPE")


def find_preset(name: str) -> Path:
    """The file of a preset, by its name or its path, as `find_recipe` finds a recipe's.

    Raises:
        InputError: if there is neither.
    """
    return _find(name, PRESETS, "preset", "--preset")


def preset_description(name: str) -> str:
    """The first line of a preset's file, a comment. Its values are settings of the run, a description not."""
    return find_preset(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _names(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _find(name: str, folder: Path, kind: str, argument: str) -> Path:
    names = _names(folder)
    if name in names:
        return folder / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        if os.path.isfile(name):
            return Path(name)
        fix = f"give the path of a {kind}, or a name from `gradmm recipes`"
        raise InputError(f"no file {name!r}", argument, fix)
    near = difflib.get_close_matches(name, names, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names)}, or a .yaml file"
    raise InputError(f"no {kind} {name!r}", argument, fix)
