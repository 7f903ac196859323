"""Versions of a recipe that lack a part of the product, or do it another way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from gradmm_core.arm_recipes import unselected
from gradmm_core.arms import ARMS
from gradmm_core.errors import InputError
from gradmm_core.recipe import Recipe, merged_settings, read_yaml, validate_recipe


class Ablation(BaseModel, frozen=True, extra="forbid"):
    """`settings` are put over the recipe's, block by block."""

    name: str = Field(min_length=1)
    settings: dict[str, Any] = {}
    #: As many texts as the recipe's, the first ones that were written and that the label filter leaves.
    unranked: bool = False


def read_ablations(path: Path, only: Sequence[str] = ()) -> tuple[Ablation, ...]:
    """Those of a YAML list, or the ones of these names.

    Raises:
        InputError: for a file that is no such list, and a name that is not there.
    """
    try:
        ablations = TypeAdapter(tuple[Ablation, ...]).validate_python(read_yaml(path, list))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{place}: {first['msg'].lower()}", str(path), "give a list of name and settings"
        ) from error
    names = [each.name for each in ablations]
    for name in only:
        if name not in names:
            raise InputError(f"no ablation {name!r}", "--only", f"choose from {', '.join(map(repr, names))}")
    return tuple(each for each in ablations if not only or each.name in only)


def ablated(recipe: Recipe, ablation: Ablation) -> Recipe:
    """The recipe with an ablation's settings; with an unranked one's no selection either.

    Raises:
        InputError: if it cannot have them.
    """
    values = merged_settings(recipe.model_dump(mode="json"), ablation.settings)
    version = validate_recipe(values, where=f"the ablation {ablation.name!r}")
    return unselected(version) if ablation.unranked else version


def check_ablations(recipe: Recipe, ablations: Sequence[Ablation]) -> None:
    """Refuses what could only fail later.

    Raises:
        InputError: for settings that the recipe cannot have, and names that are taken.
    """
    seen = set(ARMS)
    for ablation in ablations:
        if ablation.name in seen:
            raise InputError("the name is taken", f"the ablation {ablation.name!r}", "give it another")
        seen.add(ablation.name)
        ablated(recipe, ablation)
