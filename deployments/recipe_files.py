"""The recipes that come with the product, and those of the user."""

from __future__ import annotations

import difflib
from pathlib import Path

from gradmm_core.errors import InputError

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """Names of the recipes that come with the product."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: one that comes with the product, by its name, or a path to a YAML file.

    Raises:
        InputError: if there is neither.
    """
    built_in = FOLDER / f"{name}.yaml"
    if name in recipe_names():
        return built_in
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise InputError(
            f"no file {name!r}", "RECIPE", "give the path of a recipe, or a name from `gradmm recipes`"
        )
    near = difflib.get_close_matches(name, recipe_names(), n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(recipe_names())}, or a .yaml file"
    raise InputError(f"no recipe {name!r}", "RECIPE", fix)
