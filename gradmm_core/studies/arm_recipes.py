"""The recipes of a comparison's arms: how each baseline differs from the recipe under study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from gradmm.config.loading import merged_settings, validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.config.settings import ClassSettings
from gradmm.errors import InputError
from gradmm.lm.prompt import with_examples


def with_epsilon(recipe: Recipe, epsilon: float) -> Recipe:
    """Set `privacy.epsilon`.

    Raises:
        InputError: if the recipe does not allow that value.
    """
    values = recipe.model_dump(mode="json")
    return validate_recipe(merged_settings(values, {"privacy": {"epsilon": epsilon}}), where="epsilon")


def scaled(recipe: Recipe, texts: int, method: str) -> Recipe:
    """Generate `texts` texts, as evenly over the classes as possible, by a method, without selection by loss.

    Raises:
        InputError: if the recipe does not allow that method or number.
    """
    per_class = math.ceil(texts / len(recipe.classes))
    changes = {
        "generation": {"method": method, "per_class": per_class},
        "loss_selection": {"per_class": per_class, "by": "text"},
        "category_balance": {"enabled": False},
    }
    return validate_recipe(merged_settings(recipe.model_dump(mode="json"), changes), where="methods")


def unselected(recipe: Recipe) -> Recipe:
    """Remove all filters but the label filter."""
    selection = {"per_class": recipe.generation.per_class, "by": "text"}
    return recipe.model_copy(
        update={
            "loss_selection": recipe.loss_selection.model_copy(update=selection),
            "category_balance": recipe.category_balance.model_copy(update={"enabled": False}),
        }
    )


def unfiltered(recipe: Recipe) -> Recipe:
    """Remove all filters, but that of near duplicates."""
    off = recipe.label_filter.model_copy(update={"enabled": False})
    return unselected(recipe).model_copy(update={"label_filter": off})


def zero_shot(recipe: Recipe) -> Recipe:
    """Write one text for each example, without selection by loss (`unselected`), labelled as it was written.

    As the product and the rivals write, if the recipe's method is `written`: again if a text contains an answer.
    The label filter, if enabled, judges by the model alone: nothing that was released chooses the texts.
    """
    hard = recipe.labelling.model_copy(update={"labels": "hard"})
    as_written = _without_probe(_untilted(recipe)) if recipe.generation.method == "written" else rerank(recipe, 1)
    return unselected(as_written).model_copy(update={"labelling": hard})


def written(recipe: Recipe, factor: int) -> Recipe:
    """Write `factor` times as many texts as the recipe keeps, without tilt and without any use of the target."""
    changes = {"method": "written", "per_class": factor * recipe.texts_per_class}
    return _untilted(recipe).model_copy(update={"generation": recipe.generation.model_copy(update=changes)})


def few_texts(recipe: Recipe, per_class: int) -> Recipe:
    """Generate at most `per_class` texts of each class."""
    few = {"per_class": min(per_class, recipe.generation.per_class)}
    return recipe.model_copy(update={"generation": recipe.generation.model_copy(update=few)})


def without_release(recipe: Recipe, labels: Literal["hard", "soft"]) -> Recipe:
    """Label texts as they were written, or by the calibrated model."""
    labelling = recipe.labelling.model_copy(update={"labels": labels, "release": False})
    return recipe.model_copy(update={"labelling": labelling})


def soft_zero_shot(recipe: Recipe) -> Recipe:
    """Label the texts of `zero_shot` by the calibrated model, without the released probe and without a filter."""
    return without_release(unfiltered(zero_shot(recipe)), "soft")


def few_shot(recipe: Recipe) -> Recipe:
    """Append the label filter's public examples of the class to each instruction of `zero_shot`.

    Raises:
        InputError: if a class has no public example.
    """
    classes = tuple(_with_examples(category, recipe) for category in recipe.classes)
    return zero_shot(recipe).model_copy(update={"classes": classes})


def rerank(recipe: Recipe, draws: int) -> Recipe:
    """Keep the best matching of `draws` written texts for each example, without edits, tilt and probe."""
    search = recipe.generation.search.model_copy(update={"draws": draws, "rounds": 0, "fluency": 0.0})
    generation = recipe.generation.model_copy(update={"method": "search", "search": search, "probe_weight": 0.0})
    return _untilted(recipe).model_copy(update={"generation": generation})


def equal_draws(passes: float, one_draw: float, two_draws: float) -> int:
    """Number of draws that cost `passes`, given the costs of one and of two draws; at least one."""
    return max(1, 1 + round((passes - one_draw) / (two_draws - one_draw)))


def _untilted(recipe: Recipe) -> Recipe:
    """Leave words as the model writes them."""
    return recipe.model_copy(update={"word_tilt": recipe.word_tilt.model_copy(update={"strength": 0.0})})


def _without_probe(recipe: Recipe) -> Recipe:
    """Choose no text by the released probe."""
    return recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"probe_weight": 0.0})})


def _with_examples(category: ClassSettings, recipe: Recipe) -> ClassSettings:
    """Append the class's examples to its instruction."""
    texts = [example.text for example in recipe.label_filter.exemplars if example.label == category.label]
    if not texts:
        raise InputError(
            f"no example of label {category.label}; the arm few-shot needs one of each class",
            "label_filter.exemplars",
            "add some, or leave few-shot out of the arms",
        )
    return category.model_copy(update={"instruction": with_examples(category.instruction, texts)})


def with_instructions(recipe: Recipe, instructions: Mapping[int, str]) -> Recipe:
    """Replace the instructions, by label."""
    classes = (c.model_copy(update={"instruction": instructions[c.label]}) for c in recipe.classes)
    return recipe.model_copy(update={"classes": tuple(classes)})
