"""The recipes of a comparison's arms: how each way of writing differs from the recipe's own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gradmm_core.arms import ARMS, SIZES
from gradmm_core.errors import InputError
from gradmm_core.privacy import gaussian_mechanism
from gradmm_core.recipe import Recipe, merged_settings, validate_recipe
from gradmm_core.settings import ClassSettings


def with_epsilon(recipe: Recipe, epsilon: float) -> Recipe:
    """The recipe under a guarantee.

    Raises:
        InputError: if it cannot have that one.
    """
    values = recipe.model_dump(mode="json")
    return validate_recipe(merged_settings(values, {"privacy": {"epsilon": epsilon}}), where="--epsilon")


def unselected(recipe: Recipe) -> Recipe:
    """The recipe with nothing but the label filter to choose among its texts."""
    selection = {"per_class": recipe.generation.per_class, "by": "text"}
    return recipe.model_copy(
        update={
            "loss_selection": recipe.loss_selection.model_copy(update=selection),
            "category_balance": recipe.category_balance.model_copy(update={"enabled": False}),
        }
    )


def zero_shot(recipe: Recipe) -> Recipe:
    """The recipe with one text written for each example, `unselected`."""
    return unselected(_with_search(recipe, draws=1))


def few_shot(recipe: Recipe) -> Recipe:
    """`zero_shot`, written after the instruction and the label filter's public examples of the class.

    Raises:
        InputError: if a class has no such example.
    """
    classes = tuple(_with_examples(category, recipe) for category in recipe.classes)
    return zero_shot(recipe).model_copy(update={"classes": classes})


def rerank(recipe: Recipe, draws: int) -> Recipe:
    """The recipe with the best matching of so many written texts for each example, no word changed, no probe."""
    return _with_search(recipe, draws)


def equal_draws(passes: float, one_draw: float, two_draws: float) -> int:
    """Draws that cost as much as `passes`, by what one and two of them cost; at least one."""
    return max(1, 1 + round((passes - one_draw) / (two_draws - one_draw)))


def check_plan(recipe: Recipe, sizes: Sequence[int], arms: Sequence[str], epsilons: Sequence[float]) -> None:
    """Refuses what could only fail later.

    Raises:
        InputError: for sizes that the recipe cannot fill, arms that it does not have, and the like.
    """
    for name in arms:
        if name not in ARMS:
            raise InputError(f"no arm {name!r}", "--arms", f"choose from {', '.join(ARMS)}")
    _check_sizes(recipe, sizes)
    if "few-shot" in arms:
        few_shot(recipe)
    for epsilon in epsilons:
        gaussian_mechanism(with_epsilon(recipe, epsilon).privacy)


def check_few(recipe: Recipe, few: Sequence[int]) -> None:
    """Refuses what could only fail later.

    Raises:
        InputError: for numbers of real rows with a class left empty, and for a private recipe.
    """
    if recipe.privacy.epsilon is not None:
        raise InputError(
            "which rows are drawn depends on all of them", "privacy.epsilon", "--set privacy.epsilon=null"
        )
    if not few or min(few) < len(recipe.classes):
        least = len(recipe.classes)
        raise InputError(f"{list(few)}: a class would be left empty", "--rows", f"ask for at least {least}")


def check_epsilons(recipe: Recipe, epsilons: Sequence[float]) -> None:
    """Refuses what could only fail later.

    Raises:
        InputError: for a recipe that has noise already, no epsilon, or one that the recipe cannot have.
    """
    if recipe.privacy.epsilon is not None:
        raise InputError(
            "the targets with noise are held against one without", "privacy.epsilon", "--set privacy.epsilon=null"
        )
    if not epsilons:
        raise InputError("none", "--epsilon", "name some")
    for epsilon in epsilons:
        gaussian_mechanism(with_epsilon(recipe, epsilon).privacy)


def check_models(recipe: Recipe, models: Sequence[str]) -> None:
    """Refuses what could only fail later.

    Raises:
        InputError: for no model, and for one that is named twice or is the recipe's own.
    """
    if not models:
        raise InputError("none", "--models", "name hub ids or folders")
    names = [recipe.model.name, *models]
    for name in models:
        if names.count(name) > 1:
            raise InputError(
                f"{name} is there twice; the recipe's own model always is", "--models", "leave it out"
            )


def check_path(recipe: Recipe, arms: Sequence[str], learning_rate: float, real_rows: int) -> None:
    """Refuses what could only fail later.

    Raises:
        InputError: for arms that have not as many texts as the recipe's own, a rate that is no rate, and real rows
            with a class left empty.
    """
    size = all_texts(recipe)
    check_plan(recipe, [size], arms, [])
    for name in arms:
        if ARMS[name].sizes([size]) != [size]:
            fitting = [arm.name for arm in ARMS.values() if arm.sizes([size]) == [size]]
            raise InputError(f"{name} has no {size} texts", "--arms", f"choose from {', '.join(fitting)}")
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise InputError(f"{learning_rate:g} is no learning rate", "--learning-rate", "give one above zero")
    if real_rows < len(recipe.classes):
        raise InputError(
            f"{real_rows}: a class would be left empty", "--real-rows", f"ask for at least {len(recipe.classes)}"
        )


def middle_rate(recipe: Recipe) -> float:
    """Of the learning rates that the recipe would have tried, so that all arms can go along with the same one."""
    return statistics.median_low(recipe.finetune_eval.learning_rates)


def all_texts(recipe: Recipe) -> int:
    """As many as the filters let through, of all classes."""
    return len(recipe.classes) * recipe.loss_selection.per_class


def sizes_of(recipe: Recipe) -> tuple[int, ...]:
    """The paper's sizes, as far as the recipe can fill them."""
    classes = len(recipe.classes)
    return tuple(size for size in SIZES if classes <= size <= classes * recipe.loss_selection.per_class)


def _check_sizes(recipe: Recipe, sizes: Sequence[int]) -> None:
    """Refuses sizes that the recipe's texts cannot fill.

    Raises:
        InputError: for a size with a class left empty, or of more texts than the filters let through.
    """
    classes, most = len(recipe.classes), recipe.loss_selection.per_class
    if not sizes:
        raise InputError("none that the recipe can fill", "--sizes", "name some")
    for size in sizes:
        if size < classes:
            raise InputError(f"{size} texts leave one of {classes} classes empty", "--sizes", "ask for more")
        if size > classes * most:
            raise InputError(
                f"{size} texts of {classes} classes are more than loss_selection.per_class={most} allows",
                "--sizes",
                "ask for fewer, or raise it and generation.per_class with --set",
            )


def _with_search(recipe: Recipe, draws: int) -> Recipe:
    search = recipe.generation.search.model_copy(update={"draws": draws, "rounds": 0, "fluency": 0.0})
    update = {"method": "search", "search": search, "probe_weight": 0.0}
    generation = recipe.generation.model_copy(update=update)
    return recipe.model_copy(update={"generation": generation})


def _with_examples(category: ClassSettings, recipe: Recipe) -> ClassSettings:
    """Each example as the instruction's own sentences stand: with the line ends that it ends with."""
    texts = [example.text for example in recipe.label_filter.exemplars if example.label == category.label]
    if not texts:
        raise InputError(
            f"none has the label {category.label}, and the arm few-shot shows some of each class",
            "label_filter.exemplars",
            "write some, or leave the arm out with --arms",
        )
    instruction = category.instruction
    line_ends = instruction[len(instruction.rstrip("\n")) :] or "\n"
    shown = "".join(text + line_ends for text in texts)
    return category.model_copy(update={"instruction": instruction.rstrip("\n") + line_ends + shown})
