"""Ablations: variants of a recipe without one part of the product, or with another part in its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from gradmm.config.loading import merged_settings, read_yaml, validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.errors import InputError
from gradmm.studies.arm_recipes import unselected
from gradmm.studies.arms import ARMS, PRODUCT, counterpart

#: Blocks that a study takes from its recipe for all arms; another seed or other data would move the rows held out.
SHARED = {"seed", "data", "finetune_eval", "mia_audit", "execution"}

#: Settings of other blocks for which this holds too: units are held out as a whole.
SHARED_PRIVACY = {"unit_column", "redraw"}


class Ablation(BaseModel, frozen=True, extra="forbid"):
    """A named variant. `settings` override the recipe's, block by block."""

    name: str = Field(min_length=1)
    settings: dict[str, Any] = {}
    #: Replaces selection by loss: the first texts in the order of writing that pass the label filter.
    unranked: bool = False


def read_ablations(path: Path, only: Sequence[str] = ()) -> tuple[Ablation, ...]:
    """Read the ablations of a YAML list, or those named in `only`.

    Raises:
        InputError: for a file of another form, and for an unknown name.
    """
    try:
        ablations = TypeAdapter(tuple[Ablation, ...]).validate_python(read_yaml(path, list))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{place}: {first['msg'].lower()}", str(path), "give a list of name and settings"
        ) from error
    names = [ablation.name for ablation in ablations]
    for name in only:
        if name not in names:
            raise InputError(f"no ablation {name!r}", "only", f"choose from {', '.join(map(repr, names))}")
    return tuple(ablation for ablation in ablations if not only or ablation.name in only)


def ablated(recipe: Recipe, ablation: Ablation) -> Recipe:
    """Apply an ablation to a recipe.

    Raises:
        InputError: if the recipe does not allow its settings.
    """
    values = merged_settings(recipe.model_dump(mode="json"), ablation.settings)
    variant = validate_recipe(values, where=f"the ablation {ablation.name!r}")
    return unselected(variant) if ablation.unranked else variant


def check_ablations(recipe: Recipe, ablations: Sequence[Ablation]) -> None:
    """Check the names and the settings of ablations of a recipe.

    Raises:
        InputError: for settings that the recipe does not allow, for those that all arms of a study share, and for
            a name that is used twice, by an arm, or as arms of other guarantees are named.
    """
    seen = set(ARMS)
    for ablation in ablations:
        where = f"the ablation {ablation.name!r}"
        if ablation.name in seen:
            raise InputError("the name is taken", where, "choose another name")
        if counterpart(ablation.name) != PRODUCT:
            raise InputError("the name is that of an arm under another guarantee", where, "choose another name")
        seen.add(ablation.name)
        changed = ablated(recipe, ablation)
        shared = sorted(SHARED & set(ablation.settings))
        for name in sorted(SHARED_PRIVACY):
            if getattr(changed.privacy, name) != getattr(recipe.privacy, name):
                shared.append(f"privacy.{name}")
        if list(changed.class_names) != list(recipe.class_names):
            shared.append("the labels of classes, and their order")
        if shared:
            problem = f"{', '.join(shared)}: the same for all arms of a study"
            raise InputError(problem, where, "leave it out, or run the study of another recipe")
