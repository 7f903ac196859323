"""The arguments of a study (sizes, arms, ...), checked against the recipe before anything is computed.

An `InputError` names the argument in its `where`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from gradmm.config.extras import check_installed
from gradmm.config.recipe import Recipe
from gradmm.errors import InputError
from gradmm.evaluation.arm import CALIBRATED
from gradmm.evaluation.schedule import Schedule
from gradmm.privacy.ledger import Release, release_of
from gradmm.privacy.mechanism import gaussian_mechanism
from gradmm.privacy.release_plan import release_plan
from gradmm.rivals.releases import ADAPTERS, MEAN_STATES, NEXT_TOKENS, VOTES, rival_release
from gradmm.studies.arm_recipes import few_shot, scaled, with_epsilon
from gradmm.studies.arms import (
    ARMS,
    RIVALS,
    SIZES,
    SOFT_ZERO_SHOT,
    Adapters,
    Epsvec,
    FewShot,
    PrivateEvolution,
    private_arm,
)

#: Arms whose texts are written and filtered as the product's.
WRITTEN = {CALIBRATED, "zero-shot", "few-shot", SOFT_ZERO_SHOT, "rerank"}

#: Fewest texts or rows whose halves have distances.
MIN_TEXTS = 4


def check_plan(
    recipe: Recipe, sizes: Sequence[int], arms: Sequence[str], epsilons: Sequence[float] | None = None
) -> None:
    """Check sizes, arms and guarantees.

    Args:
        epsilons: of the product's arms and of rivals; None in a study that has no place for them.

    Raises:
        InputError: for a size that leaves a class empty or exceeds the number of filtered texts, an arm that is
            unknown, lacks public examples or would be written by another model, a rival that does not suit the
            recipe, and an epsilon that the recipe does not allow.
    """
    known = [*ARMS, *(RIVALS if epsilons is not None else [])]
    epsilons = epsilons or ()
    for name in arms:
        if name not in known:
            raise InputError(f"no arm {name!r}", "arms", f"choose from {', '.join(known)}")
        _check_written(recipe, name)
        if recipe.generation.endpoint is not None and (name in RIVALS or name == "rerank"):
            problem = f"{name} writes by the recipe's own model, and the product by the served one"
            raise InputError(problem, "generation.endpoint", "leave one of them out")
        if name in RIVALS:
            _check_rival(recipe, name, epsilons)
    classes, per_class = len(recipe.classes), recipe.texts_per_class
    if not sizes:
        raise InputError("the recipe can fill none of the default sizes", "sizes", "name some")
    for size in sizes:
        if size < classes:
            raise InputError(f"{size} texts leave one of {classes} classes empty", "sizes", "ask for more")
        if size > classes * per_class:
            raise InputError(
                f"{size} texts of {classes} classes exceed the {per_class} of a class that the recipe keeps",
                "sizes",
                "ask for fewer, or raise loss_selection.per_class and generation.per_class",
            )
    if "few-shot" in arms:
        few_shot(recipe)
    _check_mechanisms(recipe, epsilons)


def _check_written(recipe: Recipe, name: str) -> None:
    """Raise an InputError if an arm is written by a method that cannot be compared with the recipe's target."""
    if name in WRITTEN and recipe.target_gradient.matching == "full-gradient":
        problem = f"{name} is written, and only texts of admm are compared with a full gradient"
        raise InputError(problem, "target_gradient.matching", "leave the arm out, or match the head")


def _check_rival(recipe: Recipe, name: str, epsilons: Sequence[float]) -> None:
    """Raise an InputError if a rival has no guarantee to be compared under, or the recipe does not suit it."""
    if not epsilons:
        raise InputError(f"{name} releases under a guarantee", "epsilon", "name one, or leave the arm out")
    if recipe.privacy.unit_column is not None:
        raise InputError(f"{name} counts each record as a unit", "privacy.unit_column", "leave the arm out")
    if isinstance(RIVALS[name], FewShot) and recipe.privacy.declared_records is None:
        problem = f"{name} draws records at a rate that follows from their declared number"
        raise InputError(problem, "privacy.declared_records", "set it, or leave the arm out")
    if isinstance(RIVALS[name], Adapters):
        check_installed("peft", "lora", "arms")
    # Asked for none, or too noisy for one:
    if isinstance(RIVALS[name], PrivateEvolution) and not release_plan(recipe).target.probe_chooses_texts:
        problem = f"{name} compares texts by the features of a probe that chooses texts"
        raise InputError(problem, "target_gradient.probe_share", "set it to more than 0, or leave the arm out")


def planned_releases(recipe: Recipe, variants: Sequence[Recipe], arms: Iterable[str] = ()) -> list[Release]:
    """List the releases of a study's recipe, its variants and the rivals, without their keys.

    Args:
        variants: those of one target share its release.
        arms: of these, the rivals release under the guarantee of each variant. Arms of EPSVec share one release.
    """
    plans = [release_plan(each) for each in (recipe, *variants)]
    targets = {
        (plan.target, plan.mechanism, each.model, each.template, each.classes): plan
        for plan, each in zip(plans, (recipe, *variants), strict=True)
    }
    releases = [
        release_of(recipe.name, plan.mechanism, plan.target, recipe.privacy.unit_column)
        for plan in targets.values()
        if plan.mechanism is not None
    ]
    spaces = dict.fromkeys(_released(RIVALS[name]) for name in arms if name in RIVALS)
    for plan in plans[1:] if spaces else []:
        assert plan.mechanism is not None  # there is an epsilon
        mechanism = plan.mechanism.model_copy(update={"clipping_norm": 1.0})
        for space, parts in spaces:
            releases += [rival_release(recipe.name, mechanism, space, parts)] * parts
    return releases


def _released(rival: PrivateEvolution | Epsvec | FewShot | Adapters) -> tuple[str, int]:
    """Return what a rival releases, and how many times."""
    match rival:
        case PrivateEvolution():
            return VOTES, rival.iterations
        case Epsvec():
            return MEAN_STATES, 1
        case FewShot():
            return NEXT_TOKENS, 1
        case Adapters():
            return ADAPTERS, 1


def check_scarce(recipe: Recipe, rows: Sequence[int]) -> None:
    """Check numbers of real rows.

    Raises:
        InputError: for a number that leaves a class empty or is the number of texts, and for a private recipe.
    """
    if recipe.privacy.epsilon is not None:
        raise InputError("the draw of the rows depends on all records", "privacy.epsilon", "set it to null")
    _check_written(recipe, "zero-shot")
    classes = len(recipe.classes)
    if not rows or min(rows) < classes:
        raise InputError(f"{list(rows)} leaves a class empty", "rows", f"ask for at least {classes}")
    if (texts := all_texts(recipe)) in rows:
        problem = f"{texts:,} is also the number of texts, by which zero-shot texts are listed"
        raise InputError(problem, "rows", "ask for another number")


def check_scale(recipe: Recipe, sizes: Sequence[int], methods: Sequence[str]) -> None:
    """Check numbers of texts and generation methods.

    Raises:
        InputError: for no number or one that leaves a class empty, and for a method that is unknown or that the
            recipe does not allow.
    """
    classes = len(recipe.classes)
    if not sizes or min(sizes) < classes:
        raise InputError(f"{list(sizes)} leaves a class empty", "sizes", f"ask for at least {classes}")
    for method in methods:
        scaled(recipe, max(sizes), method)


def check_distribution(recipe: Recipe, arms: Sequence[str]) -> None:
    """Check the arms, and that there are enough texts for distances between halves of them.

    Raises:
        InputError: as `check_plan`, and for a recipe that keeps fewer than four texts.
    """
    size = all_texts(recipe)
    check_plan(recipe, [size], arms)
    if size < MIN_TEXTS:
        problem = f"halves of {size} texts have no distances"
        raise InputError(problem, "loss_selection.per_class", f"keep at least {MIN_TEXTS} texts in all")


def check_test_rows(rows: int) -> None:
    """Check that there are enough test rows for distances between halves of them.

    Raises:
        InputError: for fewer than four.
    """
    if rows < MIN_TEXTS:
        problem = f"halves of {rows} test rows have no distances"
        raise InputError(problem, "data", f"give at least {MIN_TEXTS}")


def check_epsilons(recipe: Recipe, epsilons: Sequence[float]) -> None:
    """Check the guarantees that a recipe without noise is compared with.

    Raises:
        InputError: for a private recipe, no epsilon, or an epsilon that the recipe does not allow.
    """
    if recipe.privacy.epsilon is not None:
        raise InputError("the study needs a target without noise", "privacy.epsilon", "set it to null")
    if not epsilons:
        raise InputError("none", "epsilon", "name some")
    _check_written(recipe, "zero-shot")
    _check_mechanisms(recipe, epsilons)


def check_models(recipe: Recipe, models: Sequence[str], arms: Sequence[str]) -> None:
    """Check the names of other models.

    Raises:
        InputError: for a name that is repeated or is the recipe's model, and for an arm that only the recipe's
            model has been calibrated for.
    """
    if models and CALIBRATED in arms:
        raise InputError(f"{CALIBRATED}: of the recipe's model alone", "arms", "leave it out, or the other models")
    names = [recipe.model.name, *models]
    for name in models:
        if names.count(name) > 1:
            raise InputError(f"{name} is repeated (the recipe's model is always included)", "models", "remove it")


def check_path(recipe: Recipe, arms: Sequence[str], learning_rate: float, steps: int, real_rows: int) -> None:
    """Check the arguments of a study along fine-tuning.

    Raises:
        InputError: for an arm that cannot have as many texts as the product, a learning rate that is not positive
            and finite, no steps, and a number of real rows that leaves a class empty; and for adapters, because
            the gradients are those of all parameters.
    """
    if recipe.finetune_eval.lora_rank is not None:
        problem = "adapters have no gradients of all parameters to measure"
        raise InputError(problem, "finetune_eval.lora_rank", "leave it out for this study")
    size = all_texts(recipe)
    check_plan(recipe, [size], arms)
    for name in arms:
        if ARMS[name].sizes([size]) != [size]:
            fitting = [arm.name for arm in ARMS.values() if arm.sizes([size]) == [size]]
            raise InputError(f"{name} cannot have {size} texts", "arms", f"choose from {', '.join(fitting)}")
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise InputError(f"{learning_rate:g} is not a learning rate", "learning_rate", "give a positive number")
    if steps < 1:
        raise InputError(f"{steps} is not a number of steps", "steps", "give a positive number")
    classes = len(recipe.classes)
    if real_rows < classes:
        raise InputError(f"{real_rows} leaves a class empty", "real_rows", f"ask for at least {classes}")


def middle_schedule(recipe: Recipe) -> Schedule:
    """Return the medians (the lower of two) of the recipe's learning rates and numbers of steps.

    All arms of a path study share them.
    """
    settings = recipe.finetune_eval
    return Schedule(statistics.median_low(settings.learning_rates), statistics.median_low(settings.steps))


def all_texts(recipe: Recipe) -> int:
    """Return the number of texts that pass the filters, in all classes together."""
    return len(recipe.classes) * recipe.texts_per_class


def default_sizes(recipe: Recipe) -> tuple[int, ...]:
    """Return those of the paper's sizes that the recipe can fill, and all of its texts."""
    fitting = {size for size in SIZES if len(recipe.classes) <= size <= all_texts(recipe)}
    return tuple(sorted({*fitting, all_texts(recipe)}))


def _check_mechanisms(recipe: Recipe, epsilons: Sequence[float]) -> None:
    for epsilon in epsilons:
        gaussian_mechanism(with_epsilon(recipe, epsilon).privacy)
    written = [private_arm(epsilon).name for epsilon in sorted(set(epsilons))]
    for one, other in pairwise(written):
        if one == other:
            raise InputError(f"two agree in six digits: {one}", "epsilon", "leave one of them out")
