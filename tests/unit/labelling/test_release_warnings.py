from __future__ import annotations

import pytest

from gradmm.config.loading import load_recipe
from gradmm.deployments.recipe_files import find_recipe
from gradmm.labelling.release_warnings import release_warnings, unused_release, weak_gradient
from gradmm.privacy.release_plan import release_plan


@pytest.mark.parametrize(
    ("overrides", "used"),
    [
        (["privacy.declared_records=500"], False),
        (["privacy.declared_records=5000"], True),  # by the labels
        (["privacy.declared_records=5000", "labelling.release=false"], False),
        (["privacy.declared_records=5000", "labelling.labels=hard"], False),
        (["privacy.declared_records=50000", "labelling.labels=hard"], True),  # by the words
        (["privacy.declared_records=50000", "labelling.labels=hard", "word_tilt.strength=0"], False),
        (["privacy.declared_records=500", "generation.method=search"], True),
        (["privacy.epsilon=null"], True),
    ],
)
def test_a_release_that_nothing_would_use_is_warned_about(overrides: list[str], used: bool) -> None:
    recipe = load_recipe(find_recipe("rotten_tomatoes"), ["privacy.epsilon=0.05", *overrides])
    warning = unused_release(recipe, release_plan(recipe))
    assert warning == "" if used else warning.startswith("WARNING: this release would be charged, but not be used")


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (["generation.method=search"], "5%"),
        (["generation.method=admm", "target_gradient.token_share=0.7"], "20%"),
        (["generation.method=search", "target_gradient.token_share=0.6"], None),
        ([], None),  # texts are kept as written
        (["generation.method=search", "privacy.epsilon=null"], None),
    ],
)
def test_a_method_that_matches_a_gradient_with_little_of_the_release_is_warned_about(
    overrides: list[str], share: str | None
) -> None:
    recipe = load_recipe(find_recipe("sst2"), ["privacy.epsilon=1", *overrides])
    warning = weak_gradient(recipe, release_plan(recipe))
    assert (f"which has only {share} of this release. Use the preset search" in warning) == (share is not None)
    assert (warning in release_warnings(recipe, release_plan(recipe))) == (share is not None)
