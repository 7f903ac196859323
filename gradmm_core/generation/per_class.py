"""Resolve what generation needs to know of one class: the length of its texts and its number of records.

Imports no torch, so that flows start fast.
"""

from __future__ import annotations

from gradmm.config.recipe import Recipe
from gradmm.config.settings import TargetGradientSettings
from gradmm.storage.artifacts import StageOutput


def text_tokens(recipe: Recipe, label: int, target: StageOutput) -> int:
    """Return n, the length of a class's texts: the recipe's, or the mean length of its real texts for "auto"."""
    if recipe.generation.text_tokens == "auto":
        return max(1, round(target.figures["text_tokens"][str(label)]))
    return recipe.generation.text_tokens


def class_records(recipe: Recipe, label: int, target: StageOutput) -> float | None:
    """Return the number of records of a class, or None unless texts match its mean gradient.

    In a private run, the number is an equal share of the declared records.
    """
    if not recipe.target_gradient.centred or recipe.generation.matches == "difference":
        return None
    if recipe.privacy.epsilon is None:
        return float(target.figures["records"][str(label)])
    assert recipe.privacy.declared_records is not None  # `Recipe` requires it for generation.matches=mean
    return recipe.privacy.declared_records / len(recipe.classes)


def tilts_words(recipe: Recipe, released: TargetGradientSettings) -> bool:
    """Return whether words are tilted: token rates are released, and the recipe's own model samples words.

    Args:
        released: the target's settings after parts that do not fit were left out, see `ReleasePlan`.
    """
    generation = recipe.generation
    samples = generation.method != "admm" and generation.endpoint is None
    return released.token_share > 0 and recipe.word_tilt.strength > 0 and samples
