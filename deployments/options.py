"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gradmm_core.location import Location, location

if TYPE_CHECKING:
    from gradmm_core.recipe import Recipe


def add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a name from `gradmm recipes`, or a YAML file")
    add_changes(command)


def add_changes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--preset", metavar="PRESET",
                         help="settings to put over the recipe's, before any --set: a name from `gradmm recipes`, "
                         "or a YAML file")  # fmt: skip
    command.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE",
                         help="change a setting of the recipe (repeatable)")  # fmt: skip


def add_root(command: argparse.ArgumentParser) -> None:
    command.add_argument("--root", type=parse_location, default=Path("gradmm-root"), metavar="DIR",
                         help="where stages, runs and releases are kept: a folder, or a URL such as "
                         "s3://bucket/prefix (default: ./gradmm-root)")  # fmt: skip


def parse_location(text: str) -> Location:
    try:
        return location(text)
    except ValueError as error:
        told = f"{text!r} is no folder or store ({error}); give a folder or s3://bucket/prefix"
        raise argparse.ArgumentTypeError(told) from error


def read_recipe(name: str, options: argparse.Namespace) -> Recipe:
    """A recipe with the changes that `add_changes` lets one ask for."""
    from deployments.recipe_files import find_preset, find_recipe
    from gradmm_core.recipe import load_recipe

    preset = find_preset(options.preset) if options.preset else None
    return load_recipe(find_recipe(name), options.overrides, preset)
