"""A recipe as a Prefect deployment of the flow `gradmm`, served here or for a work pool."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from deployments.recipe_files import find_recipe
from gradmm_core.location import Location, location
from gradmm_core.recipe import Recipe, load_recipe

#: What the data's owner says when they have changed; `gradmm notify` does.
DATASET_CHANGED = "gradmm.dataset.changed"


def dataset_resource(recipe: str) -> str:
    """The data of a recipe, in events."""
    return f"gradmm.dataset.{recipe}"


def parameters(recipe: Recipe, root: Location) -> dict[str, Any]:
    """All settings, so that Prefect's form for a run is filled in. The root as seen from everywhere."""
    return recipe.model_dump(mode="json") | {"root": str(root.resolve()), "force": []}


def description(recipe: Recipe) -> str:
    """For the deployment's page, in Markdown."""
    epsilon = recipe.privacy.epsilon
    return "\n\n".join(
        [
            f"{recipe.description or recipe.name}.",
            f"Private: epsilon {epsilon:g}." if epsilon else "Not private: no epsilon is set.",
            "A stage runs again only if its settings or its data have changed; if none has, a run ends "
            "`Unchanged`. In a run's parameters, what a block leaves out is taken from here.",
        ]
    )


def tags(recipe: Recipe) -> list[str]:
    return ["gradmm", "private" if recipe.privacy.epsilon else "no-guarantee"]


def deployed_recipe(recipe: str, root: str) -> dict[str, Any]:
    """A step of `prefect.yaml`: a recipe, by its name or file, as what a deployment is made of."""
    loaded = load_recipe(find_recipe(recipe))
    return {
        # By themselves: Prefect takes no placeholder for all parameters together.
        **parameters(loaded, location(root)),
        "about": description(loaded),
        "tags": tags(loaded),
        "version": version("gradmm"),
    }
