"""The grades of a run: their thresholds, and the figures that they name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradmm.outputs.grades import RULES, grades, one_line
from gradmm.outputs.record import RunRecord
from tests.unit.outputs.test_release import SENTIMENT, run_record
from tests.unit.outputs.test_report import with_figures

RUN = run_record(SENTIMENT, rows=20)


def grade_of(run: RunRecord, aspect: str) -> tuple[str, str]:
    ((grade, reason),) = [(each.grade, each.reason) for each in grades(run) if each.aspect == aspect]
    return grade, reason


def with_seeds(run: RunRecord, *seeds: int) -> RunRecord:
    settings = run.recipe.finetune_eval.model_copy(update={"seeds": seeds})
    return run.model_copy(update={"recipe": run.recipe.model_copy(update={"finetune_eval": settings})})


def test_every_aspect_has_a_grade_and_a_rule_that_names_it() -> None:
    assert [each.aspect for each in grades(RUN)] == list(RULES)
    for aspect, grade, reason in grades(RUN):
        assert f"{grade}:" in RULES[aspect]
        assert f"{aspect}: {grade} ({reason})" in one_line(RUN)
    assert "\n" not in one_line(RUN)


@pytest.mark.parametrize(
    ("synthetic", "real", "grade", "recovered"),
    [
        (0.76, 0.80, "good", "80 ± 9% of the gap"),
        (0.75, 0.80, "fair", "75 ± 9% of the gap"),
        (0.70, 0.80, "fair", "50 ± 8% of the gap"),
        (0.69, 0.80, "poor", "45 ± 8% of the gap"),
        (0.59, 0.80, "poor", "-5 ± 8% of the gap"),
        (0.61, 0.61, "not graded", "accuracy +1.0 points, where real texts change it by +1.0 points"),
        (0.70, 0.61, "good", "accuracy +10.0 points, where real texts change it by +1.0 points"),
        (0.59, 0.50, "not graded", "accuracy -1.0 points, where real texts change it by -10.0 points"),
    ],
)
def test_texts_teach_by_the_gap_recovered(synthetic: float, real: float, grade: str, recovered: str) -> None:
    figures: dict[str, Any] = {
        "accuracy_before": 0.6,
        "accuracy_synthetic": synthetic,
        "accuracy_synthetic_std": 0.015,
    }
    figures |= {"accuracy_real": real, "accuracy_real_std": 0.012}
    run = with_figures(RUN, "finetune_eval", **figures)
    found, reason = grade_of(run, "teaches")
    assert found == grade
    assert reason.startswith(recovered)
    assert reason.endswith("; 3 seeds")


def test_the_spread_of_the_gap_recovered_is_that_of_both_accuracies() -> None:
    figures: dict[str, Any] = {"accuracy_before": 0.5, "accuracy_synthetic": 0.7, "accuracy_real": 0.9}
    for synthetic, real, std in ((0.04, 0.0, 0.1), (0.0, 0.04, 0.05), (0.04, 0.04, math.hypot(0.1, 0.05))):
        stds: dict[str, Any] = {"accuracy_synthetic_std": synthetic, "accuracy_real_std": real}
        _, reason = grade_of(with_figures(RUN, "finetune_eval", **figures, **stds), "teaches")
        assert reason.startswith(f"50 ± {100 * std:.0f}%")


def test_one_seed_says_that_it_has_no_interval() -> None:
    _, reason = grade_of(with_seeds(RUN, 0), "teaches")
    assert "one seed: no interval" in reason
    assert "±" not in reason


@pytest.mark.parametrize(
    ("perplexity", "self_bleu", "grade"),
    [
        (99.0, 0.49, "good"),
        (101.0, 0.2, "fair"),
        (20.0, 0.51, "fair"),
        (399.0, 0.69, "fair"),
        (401.0, 0.2, "poor"),
        (20.0, 0.71, "poor"),
    ],
)
def test_texts_read_by_the_worse_of_perplexity_and_self_bleu_of_those_left(
    perplexity: float, self_bleu: float, grade: str
) -> None:
    run = with_figures(RUN, "generation", self_bleu=0.0, mean_log_perplexity=0.0)
    figures: dict[str, Any] = {"mean_log_perplexity": math.log(perplexity), "self_bleu": self_bleu}
    found, reason = grade_of(with_figures(run, "category_balance", **figures), "reads")
    assert (found, reason) == (grade, f"perplexity {perplexity:.3g}, self-BLEU {self_bleu:.2f}")


@pytest.mark.parametrize(
    ("epsilon", "grade"), [(0.05, "good"), (1.0, "good"), (1.01, "fair"), (10.0, "fair"), (10.1, "poor")]
)
def test_privacy_is_graded_by_epsilon_of_all_releases(epsilon: float, grade: str) -> None:
    guarantee = RUN.guarantee.model_copy(update={"composed_epsilon": epsilon})
    found, reason = grade_of(RUN.model_copy(update={"guarantee": guarantee}), "private")
    assert found == grade
    assert reason == f"epsilon {epsilon:.3g} for one record; membership inference detects nothing"


@pytest.mark.parametrize("privacy", [{"epsilon": None}, {"unsafe_noise_seed": 3}])
def test_without_a_guarantee_there_is_no_privacy(privacy: dict[str, Any]) -> None:
    assert grade_of(run_record(SENTIMENT, rows=20, **privacy), "private") == ("none", "no guarantee")


def test_an_attack_that_is_detected_makes_privacy_poor() -> None:
    run = with_figures(RUN, "mia_audit", advantage=0.18, detectable_advantage=0.1763)
    grade, reason = grade_of(run, "private")
    assert grade == "poor"
    assert "membership inference gains +18.0 points" in reason
    blind = with_figures(RUN, "mia_audit", advantage=0.18, detectable_advantage=None)
    assert grade_of(blind, "private") == (
        "good",
        "epsilon 0.05 for one record; membership inference is without power",
    )
