"""A recipe as a Prefect deployment of the flow `gradmm`, for `gradmm serve` and for work pools."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from gradmm.config.loading import load_recipe
from gradmm.config.recipe import Recipe
from gradmm.deployments.recipe_files import find_recipe
from gradmm.storage.location import Location, location

#: The event that `gradmm notify` sends when data have changed.
DATASET_CHANGED = "gradmm.dataset.changed"


def dataset_resource(recipe: str) -> str:
    """Return the name of a recipe's data in events."""
    return f"gradmm.dataset.{recipe}"


def parameters(recipe: Recipe, root: Location) -> dict[str, Any]:
    """Return all settings, which fill in Prefect's form for a run, and the root.

    Paths are absolute, because a work pool's runs have a working directory of their own.
    """
    values = recipe.model_dump(mode="json") | {"root": str(root.resolve()), "force": []}
    for block, setting in (("data", "path"), ("model", "name")):
        path = values[block][setting]
        if path is not None and os.path.exists(os.path.expanduser(path)):
            values[block][setting] = os.path.abspath(os.path.expanduser(path))
    return values


def description(recipe: Recipe) -> str:
    """Describe the deployment in Markdown, for its page."""
    epsilon = recipe.privacy.epsilon
    return "\n\n".join(
        [
            f"{recipe.description or recipe.name}.",
            f"Private: epsilon {epsilon:g}." if epsilon else "Not private: no epsilon is set.",
            "A stage runs again only if its settings or its data have changed. If no stage does, the run ends "
            "`Unchanged`. A run's parameters may give part of a block; the rest is taken from here.",
        ]
    )


def deployed_recipe(recipe: str, root: str) -> dict[str, Any]:
    """Return the fields of a deployment for a recipe, by name or file: the build step in `prefect.yaml`."""
    from gradmm.flows.runtime.deployed import tags

    loaded = load_recipe(find_recipe(recipe))
    return {
        # One field each: Prefect accepts no placeholder for all parameters together.
        **parameters(loaded, location(root)),
        "about": description(loaded),
        "tags": tags(loaded),
        "version": version("gradmm"),
    }
