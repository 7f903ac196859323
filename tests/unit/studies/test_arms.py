"""The texts of an arm at each size, and the recipes of the baselines."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.loading import load_recipe
from gradmm.config.recipe import Recipe
from gradmm.data.examples import class_counts
from gradmm.deployments.recipe_files import find_preset, find_recipe, recipe_names
from gradmm.errors import InputError
from gradmm.evaluation.arm import first_texts
from gradmm.privacy.ledger import composed_epsilon
from gradmm.studies.arm_recipes import equal_draws, few_shot, rerank, with_epsilon, zero_shot
from gradmm.studies.arms import ARMS, PRODUCT, RIVALS, private_arm
from gradmm.studies.plans import check_plan, default_sizes, planned_releases


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(find_recipe("sst2"), preset=find_preset("search"))


@given(size=st.integers(0, 200), labels=st.lists(st.integers(0, 9), min_size=1, max_size=7, unique=True))
def test_sizes_are_split_evenly_and_smaller_ones_are_parts_of_larger(size: int, labels: list[int]) -> None:
    counts, more = class_counts(size, labels), class_counts(size + 1, labels)
    assert list(counts) == labels
    assert sum(counts.values()) == size
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(counts[label] <= more[label] for label in labels)


def labelled() -> pd.DataFrame:
    """Shuffled texts of two classes. Ids give the order of writing, ranks the order of matching."""
    rows = [
        ("1-00000", 1, 3),
        ("0-00002", 0, 1),
        ("0-00000", 0, 3),
        ("1-00002", 1, 1),
        ("0-00003", 0, 4),
        ("1-00001", 1, 2),
    ]
    frame = pd.DataFrame(rows, columns=["id", "written_for", "rank"])
    return frame.assign(
        label=0, text="text " + frame["id"]
    )  # all look like class 0, whatever they were written for


def test_the_products_texts_are_the_best_matching_and_written_ones_the_first() -> None:
    def ids(arm: str, size: int) -> list[str]:
        chosen = first_texts(labelled(), ARMS[arm], class_counts(size, [0, 1]))["id"].tolist()
        assert chosen == [each for each in labelled()["id"] if each in chosen]  # in the order of the rows
        return sorted(chosen)

    for arm in (PRODUCT, "rerank"):
        assert ids(arm, 2) == ["0-00002", "1-00002"]
        assert ids(arm, 3) == ["0-00000", "0-00002", "1-00002"]
    for arm in ("zero-shot", "few-shot"):
        assert ids(arm, 2) == ["0-00000", "1-00000"]
        assert ids(arm, 4) == ["0-00000", "0-00002", "1-00000", "1-00001"]
    assert len(ids(PRODUCT, 100)) == 6


def test_a_private_arm_takes_its_texts_as_the_products() -> None:
    arm = private_arm(0.05)
    assert arm.name == "gradmm, epsilon 0.05"
    assert first_texts(labelled(), arm, {0: 1, 1: 1})["id"].tolist() == ["0-00002", "1-00002"]
    assert arm.sizes([5, 10]) == [5, 10]


def test_arms_of_real_rows_are_private_and_some_arms_have_a_fixed_size() -> None:
    assert {name for name, arm in ARMS.items() if arm.private_rows} == {
        "herding",
        "k-center",
        "random",
        "real-100",
        "real-1k",
        "all rows",
    }
    fixed = ("before", "calibrated model", "real-100", "real-1k", "all rows", "random")
    assert [ARMS[name].sizes([5, 10], 42) for name in fixed] == [[0], [0], [100], [1000], [42], [5, 10]]
    assert ARMS["all rows"].sizes([5, 10]) == []  # unknown without the data


@pytest.mark.parametrize("preset", ["zero-shot", "rerank"])
def test_baselines_write_as_the_presets_do(preset: str) -> None:
    by_preset = load_recipe(find_recipe("sst2"), preset=find_preset(preset)).generation
    recipe = load_recipe(find_recipe("sst2"), ["generation.method=admm"])
    ours = zero_shot(recipe) if preset == "zero-shot" else rerank(recipe, by_preset.search.draws)
    written = by_preset.search.model_dump() | ({} if preset == "rerank" else {"draws": 1})
    assert ours.generation.search.model_dump() == written
    assert ours.generation.method == "search"


def test_only_the_label_filter_selects_among_written_texts(recipe: Recipe) -> None:
    recipe = recipe.model_copy(
        update={"loss_selection": recipe.loss_selection.model_copy(update={"per_class": 3, "by": "set"})}
    )
    for written in (zero_shot(recipe), few_shot(recipe)):
        assert written.loss_selection.per_class == recipe.generation.per_class
        assert written.loss_selection.by == "text"
        assert not written.category_balance.enabled
        assert written.label_filter == recipe.label_filter
        assert Recipe.model_validate(written.model_dump()) == written
    filters = ("label_filter", "loss_selection", "category_balance", "target_gradient", "classes")
    assert all(getattr(rerank(recipe, 7), block) == getattr(recipe, block) for block in filters)


@pytest.mark.parametrize("name", recipe_names())
def test_few_shot_appends_each_classs_public_examples_in_the_instructions_format(name: str) -> None:
    recipe = load_recipe(find_recipe(name))
    changed = few_shot(recipe)
    for before, after in zip(recipe.classes, changed.classes, strict=True):
        assert after.model_copy(update={"instruction": before.instruction}) == before
        shown = after.instruction.removeprefix(before.instruction)
        assert shown != after.instruction  # the instruction comes first, unchanged
        own = [e.text for e in recipe.label_filter.exemplars if e.label == before.label]
        assert [line for line in shown.split("\n") if line] == own
        ends = len(before.instruction) - len(before.instruction.rstrip("\n"))
        assert len(after.instruction) - len(after.instruction.rstrip("\n")) == ends
    assert changed.template == recipe.template


def test_few_shot_needs_an_example_of_each_class(recipe: Recipe) -> None:
    some = tuple(e for e in recipe.label_filter.exemplars if e.label == 1)
    without = recipe.model_copy(
        update={"label_filter": recipe.label_filter.model_copy(update={"exemplars": some})}
    )
    with pytest.raises(InputError, match=r"no example of label 0.*leave few-shot out of the arms"):
        few_shot(without)
    check_plan(without, [10], ["zero-shot"], [])


@given(fixed=st.floats(0, 100), draw=st.floats(0.5, 100), draws=st.integers(1, 5000), part=st.floats(-0.49, 0.49))
def test_equal_draws_cost_the_given_passes(fixed: float, draw: float, draws: int, part: float) -> None:
    assert equal_draws(fixed + (draws + part) * draw, fixed + draw, fixed + 2 * draw) == draws
    assert equal_draws(0.0, fixed + draw, fixed + 2 * draw) == 1


def test_a_guarantee_is_put_over_the_recipe_and_checked(recipe: Recipe) -> None:
    private = with_epsilon(recipe, 0.5)
    assert private.privacy.epsilon == 0.5
    assert private.model_copy(update={"privacy": recipe.privacy}) == recipe
    with pytest.raises(InputError, match=r"privacy\.epsilon"):
        with_epsilon(recipe, -1.0)
    with pytest.raises(InputError, match="text_tokens"):
        with_epsilon(load_recipe(find_recipe("sst2"), ["generation.text_tokens=auto"]), 1.0)


@pytest.mark.parametrize(
    ("sizes", "arms", "epsilons", "message"),
    [
        ([1], [PRODUCT], [], "sizes: 1 texts leave one of 2 classes empty; ask for more"),
        ([10, 101], [PRODUCT], [], "sizes: 101 texts of 2 classes exceed the 50 of a class that the recipe keeps"),
        ([10], ["herdin"], [], "arms: no arm 'herdin'; choose from before, calibrated model"),
        ([10], [PRODUCT], [0.0], "epsilon"),
    ],
)
def test_impossible_plans_are_refused(
    recipe: Recipe, sizes: list[int], arms: list[str], epsilons: list[float], message: str
) -> None:
    with pytest.raises(InputError) as refusal:
        check_plan(recipe, sizes, arms, epsilons)
    assert message in str(refusal.value)


def test_the_papers_formula_is_refused_where_it_proves_nothing() -> None:
    paper = load_recipe(find_recipe("sst2"), preset=Path(find_preset("paper")))
    check_plan(paper, [10, 100], list(ARMS), [0.05])
    with pytest.raises(InputError):
        check_plan(paper, [10], list(ARMS), [20.0])


def test_default_sizes_are_those_of_the_paper_that_the_recipe_can_fill_and_all_its_texts(recipe: Recipe) -> None:
    assert default_sizes(recipe) == (5, 10, 20, 50, 100)
    assert default_sizes(load_recipe(find_recipe("demo"))) == (5, 10, 20, 50, 100, 400)
    assert default_sizes(load_recipe(find_recipe("tweet_emotions_six"))) == (10, 20, 50, 100, 6000)
    for name in recipe_names():
        each = load_recipe(find_recipe(name))
        check_plan(each, default_sizes(each), list(ARMS), [0.5])
    with pytest.raises(InputError, match="can fill none of the default sizes"):
        check_plan(recipe, [], [PRODUCT], [])


def test_the_releases_of_a_comparison_are_the_products_and_one_of_each_rival(recipe: Recipe) -> None:
    arms = ["random", *RIVALS]
    assert planned_releases(recipe, [], arms) == []
    for epsilon in (0.05, 1.0):
        releases = planned_releases(recipe, [with_epsilon(recipe, epsilon)], arms)
        kinds = [(release.space, release.sigma) for release in releases]
        assert sorted(Counter(kinds).values()) == [1, 1, 1, 1, 1, 10]
        for kind in set(kinds):
            alike = [each for each, of_each in zip(releases, kinds, strict=True) if of_each == kind]
            assert composed_epsilon(alike, alike[0].delta, "add-or-remove") == pytest.approx(epsilon, rel=1e-6)
    private = with_epsilon(recipe, 0.5)
    others = [with_epsilon(private, epsilon) for epsilon in (0.2, 1.0)]
    assert [release.epsilon for release in planned_releases(private, others)] == [0.5, 0.2, 1.0]


def test_variants_of_one_target_share_its_release(recipe: Recipe) -> None:
    private = with_epsilon(recipe, 0.5)
    hard = private.model_copy(update={"labelling": private.labelling.model_copy(update={"labels": "hard"})})
    half = private.target_gradient.model_copy(update={"probe_share": 0.25})
    without = private.model_copy(update={"target_gradient": half})
    assert len(planned_releases(private, [hard])) == 1
    assert len(planned_releases(private, [hard, without, without])) == 2


def test_adapters_need_their_package(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    check_plan(recipe, [10], ["before"], [1.0])
    with pytest.raises(InputError, match=r"arms: peft is not installed; pip install 'gradmm\[lora\]'"):
        check_plan(recipe, [10], ["dp-adapters"], [1.0])
