"""The verdict on a run in one line: a grade of how well its texts teach, how they read, how private they are.

Every grade is worked out from figures that the run has. `RULES` states how, in the words of the report's glossary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradmm.config.recipe import Recipe
from gradmm.outputs.formatting import percent, points
from gradmm.outputs.record import FILTERS, RunRecord
from gradmm.privacy.guarantee import rounded_up

GOOD, FAIR, POOR, NONE, UNKNOWN = "good", "fair", "poor", "none", "not graded"

#: Minimum share recovered of the accuracy gap between the model before fine-tuning and real texts.
GOOD_RECOVERY, FAIR_RECOVERY = 0.8, 0.5

#: Least gain in accuracy by real texts: with less, there is no gap to recover.
MIN_GAIN = 0.02

#: Highest perplexity per token under the model.
GOOD_PERPLEXITY, FAIR_PERPLEXITY = 100.0, 400.0

#: Highest self-BLEU.
GOOD_SELF_BLEU, FAIR_SELF_BLEU = 0.5, 0.7

#: Highest epsilon of all releases together: the first two tiers of Ponomareva et al. (How to DP-fy ML, JAIR 2023).
GOOD_EPSILON, FAIR_EPSILON = 1.0, 10.0

RULES = {
    "teaches": (
        "Gap recovered: (accuracy on synthetic texts - accuracy before) / (accuracy on as many real texts - "
        f"accuracy before), or on all of them if they are fewer. {GOOD}: at least {GOOD_RECOVERY:.0%}; "
        f"{FAIR}: at least {FAIR_RECOVERY:.0%}; {POOR}: less. "
        f"If real texts add less than {100 * MIN_GAIN:g} points, this is no measure. Then {GOOD}: synthetic "
        f"texts add {100 * MIN_GAIN:g} points or more; {UNKNOWN}: they add less. With several seeds, ± is the "
        "standard deviation that follows from those of both accuracies; one seed has no interval."
    ),
    "reads": (
        "Perplexity (exponential of the mean log-perplexity) and self-BLEU of the texts left; the worse one "
        f"counts. {GOOD}: perplexity at most {GOOD_PERPLEXITY:g} and self-BLEU at most {GOOD_SELF_BLEU:g}; "
        f"{FAIR}: at most {FAIR_PERPLEXITY:g} and {FAIR_SELF_BLEU:g}; {POOR}: more. Perplexity is under the model "
        "that wrote the texts, and does not compare with that of another model. Read some texts, too."
    ),
    "private": (
        f"Epsilon of all releases under the root together. {GOOD}: at most {GOOD_EPSILON:g}; {FAIR}: at most "
        f"{FAIR_EPSILON:g}; {POOR}: more (the tiers of Ponomareva et al., How to DP-fy ML, 2023). {POOR} too if "
        f"membership inference finds more than the advantage that it detects with 80% power. {NONE}: without a "
        "guarantee. The audit of the mechanism is passed: a run that fails it stops."
    ),
}


class Grade(NamedTuple):
    """The grade of one aspect, a key of `RULES`, and the figures that it follows from."""

    aspect: str
    grade: str
    reason: str


def grades(run: RunRecord) -> list[Grade]:
    """Grade a run, in the order of `RULES`.

    Raises:
        KeyError: if a figure is missing.
    """
    return [_teaches(run.stage("finetune_eval").figures, run.recipe), _reads(run), _private(run)]


def one_line(run: RunRecord) -> str:
    """Return all grades in one line of plain text."""
    return "; ".join(f"{aspect}: {grade} ({reason})" for aspect, grade, reason in grades(run))


def _teaches(figures: Mapping[str, Any], recipe: Recipe) -> Grade:
    before = figures["accuracy_before"]
    gained, possible = (figures[f"accuracy_{arm}"] - before for arm in ("synthetic", "real"))
    seeds = len(recipe.finetune_eval.seeds)
    over = f"{seeds} seeds" if seeds > 1 else "one seed: no interval"
    if possible < MIN_GAIN:
        beside = f"where real texts change it by {points(possible)}; {over}"
        return Grade("teaches", GOOD if gained >= MIN_GAIN else UNKNOWN, f"accuracy {points(gained)}, {beside}")
    recovered, std = round(gained / possible, 2), None  # as shown
    if seeds > 1:
        errors = [figures[f"accuracy_{arm}_std"] for arm in ("synthetic", "real")]
        std = math.hypot(errors[0], recovered * errors[1]) / possible
    grade = GOOD if recovered >= GOOD_RECOVERY else FAIR if recovered >= FAIR_RECOVERY else POOR
    return Grade("teaches", grade, f"{percent(recovered, std, digits=0)} of the gap to real texts; {over}")


def _reads(run: RunRecord) -> Grade:
    by_name = {stage.stage: stage.figures for stage in run.stages}
    texts = [by_name[name] for name in ("generation", *FILTERS) if "self_bleu" in by_name.get(name, {})][-1]
    perplexity, self_bleu = math.exp(texts["mean_log_perplexity"]), texts["self_bleu"]
    if perplexity <= GOOD_PERPLEXITY and self_bleu <= GOOD_SELF_BLEU:
        grade = GOOD
    else:
        grade = FAIR if perplexity <= FAIR_PERPLEXITY and self_bleu <= FAIR_SELF_BLEU else POOR
    return Grade("reads", grade, f"perplexity {perplexity:.3g}, self-BLEU {self_bleu:.2f}")


def _private(run: RunRecord) -> Grade:
    guarantee, audit = run.guarantee, run.stage("mia_audit").figures
    epsilon = guarantee.composed_epsilon
    if guarantee.epsilon is None or not guarantee.safe or epsilon is None:
        return Grade("private", NONE, "no guarantee")
    advantage, detectable = audit["advantage"], audit["detectable_advantage"]
    promise = f"epsilon {rounded_up(epsilon, 3)} for {guarantee.unit}"
    if detectable is not None and advantage > detectable:
        return Grade("private", POOR, f"{promise}, but membership inference gains {points(advantage)}")
    grade = GOOD if epsilon <= GOOD_EPSILON else FAIR if epsilon <= FAIR_EPSILON else POOR
    attack = "is without power" if detectable is None else "detects nothing"
    return Grade("private", grade, f"{promise}; membership inference {attack}")
