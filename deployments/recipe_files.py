"""The recipes, presets and ablations that come with gradmm, and those of the user."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from gradmm.errors import InputError

FOLDER = Path(__file__).parent
#: The model of a new recipe: the paper's.
DEFAULT_MODEL = "microsoft/phi-1_5"

RECIPES, PRESETS, ABLATIONS = FOLDER / "recipes", FOLDER / "presets", FOLDER / "ablations"


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with gradmm."""
    return _names(RECIPES)


def preset_names() -> list[str]:
    """Return the names of the presets that come with gradmm."""
    return _names(PRESETS)


def find_recipe(name: str) -> Path:
    """Find the file of a recipe: by the name of one that comes with gradmm, or by the path of a YAML file.

    Raises:
        InputError: if there is neither.
    """
    return _find(name, RECIPES, "recipe")


def find_preset(name: str) -> Path:
    """Find the file of a preset, by name or by path, as `find_recipe` does.

    Raises:
        InputError: if there is neither.
    """
    return _find(name, PRESETS, "preset")


def find_ablations(name: str) -> Path:
    """Find a file of ablations, by name or by path, as `find_recipe` does.

    Raises:
        InputError: if there is neither.
    """
    return _find(name, ABLATIONS, "list of ablations")


def default_ablations(method: str) -> Path:
    """Return the file of the ablations for a generation method."""
    return find_ablations("written" if method == "written" else "search")


def preset_description(name: str) -> str:
    """Return the comment in the first line of a preset. A description as a setting would change the recipe's."""
    return find_preset(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _names(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _find(name: str, folder: Path, kind: str) -> Path:
    names = _names(folder)
    if name in names:
        return folder / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        if os.path.isfile(name):
            return Path(name)
        fix = f"give the path of a {kind}, or one of {', '.join(names)}"
        raise InputError(f"no file {name!r}", kind, fix)
    near = difflib.get_close_matches(name, names, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names)}, or give a .yaml file"
    raise InputError(f"no {kind} {name!r}", kind, fix)
