"""Arguments that a study refuses before it computes anything."""

from __future__ import annotations

from typing import Any

import pytest

from gradmm.config.loading import load_recipe
from gradmm.config.recipe import Recipe
from gradmm.deployments.recipe_files import find_preset, find_recipe
from gradmm.errors import InputError
from gradmm.studies.ablations import Ablation, check_ablations
from gradmm.studies.arm_recipes import zero_shot
from gradmm.studies.plans import check_distribution, check_models, check_plan

SERVED = "generation.endpoint={url: 'http://127.0.0.1:9/v1', model: m}"


def sst2(*overrides: str, preset: str | None = None) -> Recipe:
    return load_recipe(find_recipe("sst2"), overrides, find_preset(preset) if preset else None)


@pytest.mark.parametrize("arm", ["rerank", "private-evolution", "epsvec", "dp-few-shot"])
def test_arms_of_the_recipes_own_model_are_not_compared_with_texts_of_a_served_one(arm: str) -> None:
    check_plan(sst2(), [2000], [arm], [1.0])
    with pytest.raises(InputError, match=f"{arm} writes by the recipe's own model") as refused:
        check_plan(sst2(SERVED), [2000], [arm], [1.0])
    assert refused.value.where == "generation.endpoint"
    check_plan(sst2(SERVED), [2000], ["before", "zero-shot", "random"], [1.0])


def test_the_calibrated_model_is_the_recipes_own() -> None:
    check_models(sst2(), [], ["calibrated model"])
    check_models(sst2(), ["other"], ["before"])
    with pytest.raises(InputError, match="calibrated model: of the recipe's model alone"):
        check_models(sst2(), ["other"], ["before", "calibrated model"])


def test_distances_between_halves_take_four_texts() -> None:
    check_distribution(sst2("generation.per_class=2"), ["random"])
    with pytest.raises(InputError, match="halves of 2 texts have no distances"):
        check_distribution(sst2("generation.per_class=1"), ["random"])


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("longer", {"finetune_eval": {"steps": 1000}}, "finetune_eval: the same for all arms of a study"),
        ("another draw", {"seed": 5, "data": {"test_rows": 3}}, "data, seed: the same for all arms"),
        (
            "noise, epsilon 0.1",
            {"privacy": {"epsilon": 0.1}},
            "the name is that of an arm under another guarantee",
        ),
        ("gradmm", {}, "the name is taken"),
    ],
)
def test_an_ablation_changes_what_makes_texts_and_nothing_else(
    name: str, settings: dict[str, Any], problem: str
) -> None:
    check_ablations(sst2(), [Ablation(name="hard", settings={"labelling": {"labels": "hard"}})])
    with pytest.raises(InputError, match=problem) as refused:
        check_ablations(sst2(), [Ablation(name=name, settings=settings)])
    assert refused.value.where == f"the ablation {name!r}"


def test_zero_shot_texts_are_written_as_the_recipes_own() -> None:
    settings = ["generation.written.top_k=7", "generation.written.draws=3"]
    generation = zero_shot(sst2(*settings)).generation
    assert (generation.method, generation.written.top_k, generation.written.draws) == ("written", 7, 3)
    assert zero_shot(sst2(*settings)).word_tilt.strength == 0
    searched = zero_shot(sst2(preset="search")).generation
    assert (searched.method, searched.search.draws, searched.search.rounds) == ("search", 1, 0)
