"""Messages about a release, logged before it is charged."""

from __future__ import annotations

from gradmm.config.recipe import Recipe
from gradmm.generation.per_class import tilts_words
from gradmm.labelling.labelling import uses_release
from gradmm.privacy.release_plan import ReleasePlan
from gradmm.target.preflight import parts_left_out

#: Share of a release below which a warning says that its gradient has little of it.
SMALL_SHARE = 0.25


def unused_release(recipe: Recipe, plan: ReleasePlan) -> str:
    """Warn of a release that neither the words nor the labels of written texts would use; empty otherwise."""
    labelled = recipe.labelling.labels == "soft" and uses_release(recipe.labelling, plan.target)
    used = recipe.generation.method != "written" or tilts_words(recipe, plan.target) or labelled
    if used or plan.mechanism is None:
        return ""
    return (
        "WARNING: this release would be charged, but not be used: the model alone would write and label the "
        "texts. Use more records, a larger privacy.epsilon, or the preset search"
    )


def weak_gradient(recipe: Recipe, plan: ReleasePlan) -> str:
    """Warn of a method that matches a gradient with little of the release; empty otherwise."""
    share = 1 - plan.target.probe_share - plan.target.token_share
    method = recipe.generation.method
    if method == "written" or plan.mechanism is None or share >= SMALL_SHARE:
        return ""
    return (
        f"WARNING: generation.method={method} matches the gradient, which has only {share:.0%} of this release. "
        "Use the preset search or paper, or reduce target_gradient.token_share and probe_share"
    )


def release_warnings(recipe: Recipe, plan: ReleasePlan) -> list[str]:
    """Say what the noise leaves out of a release, and warn if the rest is of no or little use."""
    lines = (*parts_left_out(recipe, plan), unused_release(recipe, plan), weak_gradient(recipe, plan))
    return [line for line in lines if line]
