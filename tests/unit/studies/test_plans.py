"""Arguments that a study refuses before it computes anything."""

from __future__ import annotations

from typing import Any

import pytest

from gradmm.config.loading import load_recipe
from gradmm.config.recipe import Recipe
from gradmm.deployments.recipe_files import find_preset, find_recipe
from gradmm.errors import InputError
from gradmm.filters.rows import filters_by_probe
from gradmm.privacy.release_plan import release_plan
from gradmm.studies.ablations import Ablation, check_ablations
from gradmm.studies.arm_recipes import few_shot, zero_shot
from gradmm.studies.plans import check_distribution, check_epsilons, check_models, check_plan, check_scarce

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


def test_no_arm_is_written_for_a_full_gradient() -> None:
    recipe = sst2(
        "target_gradient={matching: full-gradient, space: full, centred: false, probe_share: 0, token_share: 0}",
        "generation.method=admm",
        "generation.loss=cosine",
        "labelling={labels: hard}",
        preset="paper",
    )
    check_plan(recipe, [2], ["before", "random"])
    for arm in ("zero-shot", "few-shot", "soft zero-shot", "rerank", "calibrated model"):
        with pytest.raises(InputError, match=f"{arm} is written, and only texts of admm are compared") as refused:
            check_plan(recipe, [2], [arm])
        assert refused.value.where == "target_gradient.matching"
    for check in (lambda: check_scarce(recipe, [4]), lambda: check_epsilons(recipe, [1.0])):
        with pytest.raises(InputError, match="zero-shot is written"):
            check()


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
        ("persons", {"privacy": {"unit_column": "user"}}, r"privacy.unit_column: the same for all arms"),
        ("new draws", {"privacy": {"redraw": True}}, r"privacy.redraw: the same for all arms"),
        (
            "another order",
            {"classes": [each.model_dump() for each in reversed(sst2().classes)]},
            "the labels of classes, and their order: the same for all arms",
        ),
        ("gradmm", {}, "the name is taken"),
    ],
)
def test_an_ablation_changes_what_makes_texts_and_nothing_else(
    name: str, settings: dict[str, Any], problem: str
) -> None:
    private = sst2("privacy.epsilon=1", "privacy.declared_records=1000")
    check_ablations(sst2(), [Ablation(name="hard", settings={"labelling": {"labels": "hard"}})])
    with pytest.raises(InputError, match=problem) as refused:
        check_ablations(private, [Ablation(name=name, settings=settings)])
    assert refused.value.where == f"the ablation {name!r}"


def test_zero_shot_texts_are_written_as_the_recipes_own() -> None:
    settings = ["generation.written.top_k=7", "generation.written.draws=3"]
    generation = zero_shot(sst2(*settings)).generation
    assert (generation.method, generation.written.top_k, generation.written.draws) == ("written", 7, 3)
    assert zero_shot(sst2(*settings)).word_tilt.strength == 0
    searched = zero_shot(sst2(preset="search")).generation
    assert (searched.method, searched.search.draws, searched.search.rounds) == ("search", 1, 0)


@pytest.mark.parametrize("preset", [None, "search", "zero-shot"])
def test_no_release_filters_texts_written_without_data(preset: str | None) -> None:
    exemplars = [{"text": f"{name} words", "label": label} for label, name in enumerate(("bad", "good"))]
    recipe = sst2("label_filter.enabled=true", f"label_filter.exemplars={exemplars}", preset=preset)
    released = release_plan(recipe).target
    assert filters_by_probe(recipe, released) == (preset != "zero-shot")
    for arm in (zero_shot(recipe), few_shot(recipe)):
        assert arm.label_filter.enabled
        assert not filters_by_probe(arm, released)


def test_two_epsilons_have_two_names() -> None:
    check_epsilons(sst2(), [0.05, 1.0, 1.0])
    for check in (lambda of: check_epsilons(sst2(), of), lambda of: check_plan(sst2(), [100], ["before"], of)):
        with pytest.raises(InputError, match="two agree in six digits: gradmm, epsilon 1") as refused:
            check([1.0000001, 0.05, 1.0])
        assert refused.value.where == "epsilon"
