"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from gradmm.deployments.recipe_files import find_preset, find_recipe, preset_names, recipe_names
from gradmm.errors import InputError
from gradmm.storage.location import Location, location

if TYPE_CHECKING:
    from gradmm.config.recipe import Recipe


def _parse_location(_: Any, tokens: Sequence[Token]) -> Location:
    text = tokens[0].value
    try:
        if not text:  # of an unset variable, and `Path("")` is the current folder
            raise ValueError("it is empty")
        return location(text)
    except ValueError as error:
        what = f"{text!r} is neither a folder nor an object store ({error})"
        raise InputError(what, "root", "give a folder or s3://bucket/prefix") from error


def _complete_run(context: Any) -> dict[str, str]:
    from gradmm.deployments.cli.history import past_runs

    return {run.run_id: str(run.recipe.get("name", "")) for run in past_runs(context["root"].value)[0]}


RecipeName = Annotated[
    str, Parameter(help="Name from `gradmm recipes`, or a YAML file.", completer=lambda _: recipe_names())
]
RunName = Annotated[str, Parameter(help="Id from `gradmm runs`, or a run's folder.", completer=_complete_run)]
_ROOT = "Folder of stages, runs and ledgers, or a URL such as s3://bucket/prefix."
Root = Annotated[Location, Parameter(metavar="DIR", converter=_parse_location, help=_ROOT)]
DEFAULT_ROOT = Path("gradmm-root")
Json = Annotated[bool, Parameter(help="Print JSON.")]
Quiet = Annotated[bool, Parameter(help="Show no progress; print only the run's folder.")]
Verbose = Annotated[bool, Parameter(help="Show Prefect's log too.")]

#: All words of the command line, for commands that record them. Filled in by `main`.
Words = Annotated[Sequence[str], Parameter(parse=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to a recipe.

    Args:
        preset: Preset to apply before any --set: a name from `gradmm recipes`, or a YAML file.
        overrides: Change one setting of the recipe. Repeatable.
    """

    preset: Annotated[str | None, Parameter(metavar="PRESET", completer=lambda _: preset_names())] = None
    overrides: Annotated[tuple[str, ...], Parameter("--set", metavar="A.B=VALUE")] = ()

    def load(self, recipe: str, *more: str) -> Recipe:
        """Load a recipe with these changes, then the overrides in `more`."""
        from gradmm.config.loading import load_recipe

        preset = find_preset(self.preset) if self.preset else None
        return load_recipe(find_recipe(recipe), [*self.overrides, *more], preset)
