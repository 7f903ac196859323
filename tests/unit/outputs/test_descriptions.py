"""Purpose, result and figures of each stage, as the terminal, the UI and the report show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gradmm.filters.rows import filter_figures
from gradmm.outputs.descriptions import STAGES, accuracy_rows, stage_figures, stage_result, verdict
from gradmm.outputs.record import StageRecord
from tests.unit.outputs.test_release import SENTIMENT, run_record

RUN = run_record(SENTIMENT, rows=20)


def of_stage(stage: str, **changes: Any) -> StageRecord:
    record = RUN.stage(stage)
    return record.model_copy(update={"figures": record.figures | changes})


RESULTS = {
    "target_gradient": "97,462 records, 42.0% clipped, noise sigma 59.8, cosine with the clean target 0.87, 0.87",
    "generation": "40 texts, target shrinkage factor 0.91, 0.91, matching loss 0.312, log-perplexity 5.43, "
    "61,234 token passes per text",
    "loss_selection": "20 of 20 texts left, matching loss 0.312, as a set 0.042 (0.082 before), log-perplexity "
    "5.43 (10 negative, 10 positive)",
    "finetune_eval": "accuracy before 60.3%, on synthetic texts 71.3 ± 1.2%, on as many real texts 73.8 ± 1.0%",
    "mechanism_audit": "noise 100.2% of what is claimed; lower bound on epsilon 0.01 (0.01 "
    "expected, 0.05 claimed)",
    "mia_audit": "advantage +2.8 ± 6.1 points, AUC 0.518 (100 members and 100 non-members; detectable with 80% "
    "power: 17.6 points)",
    "memorisation": "90,417 copies of members, longest common run 11 words",
}


@pytest.mark.parametrize("stage", RESULTS)
def test_result_is_one_line(stage: str) -> None:
    assert stage_result(RUN.stage(stage), RUN.recipe) == RESULTS[stage]


def test_result_names_the_probe_where_there_is_one() -> None:
    target = of_stage("target_gradient", probe_shrinkage=0.8863, sigma=None)
    assert stage_result(target, RUN.recipe).endswith("probe shrinkage factor 0.89, no noise")
    assert "probe loss 0.130, log" in stage_result(of_stage("label_filter", mean_probe_loss=0.13), RUN.recipe)
    for probe, words in ((23, ", 23 probe dimensions"), (None, "")):
        figures = {"coordinates": 3200, "probe_dimensions": probe}
        space = RUN.stage("generation").model_copy(update={"stage": "target_space", "figures": figures})
        assert stage_result(space, RUN.recipe) == f"3,200 coordinates per class{words}"


def test_result_of_one_copy_is_in_the_singular() -> None:
    assert stage_result(of_stage("memorisation", copies_of_any_member=1), RUN.recipe).startswith(
        "1 copy of a member,"
    )


def test_result_of_a_filter_that_drops_all_texts_has_no_quality() -> None:
    texts = pd.DataFrame({"label": [0, 1, 1], "kept": False})
    record = RUN.stage("label_filter").model_copy(update={"rows": 3, "figures": filter_figures(texts)})
    assert stage_result(record, RUN.recipe) == "0 of 3 texts left (0 negative, 0 positive)"


def test_a_stage_of_a_study_has_its_rows_for_a_result() -> None:
    record = StageRecord(stage="compare", path=Path("x"), sha256="", rows=1234, figures={}, cached=True, seconds=0)
    assert stage_result(record, RUN.recipe) == "1,234 rows"


@pytest.mark.parametrize("stage", [stage.stage for stage in RUN.stages])
def test_figures_are_terms_and_values_of_every_stage(stage: str) -> None:
    rows = stage_figures(RUN.stage(stage), RUN.recipe)
    assert rows
    assert len({term for term, _ in rows}) == len(rows)
    assert all(term and value and "_" not in term for term, value in rows)


def test_figures_have_class_names_and_words() -> None:
    rows = dict(stage_figures(of_stage("generation"), RUN.recipe))
    assert rows["target shrinkage factor"] == "negative 0.9123, positive 0.9123"
    assert rows["self-BLEU"] == "0.1235"
    rows = dict(stage_figures(of_stage("memorisation", sign_test_p=None), RUN.recipe))
    assert rows["longest common run in words"] == "members 2.25 (max 2.25), non-members 2.25 (max 2.25)"
    assert rows["share of 8-grams in common"] == "members none (max none), non-members none (max none)"
    assert rows["texts nearer to a member than to a non-member"] == "62.5%"
    assert rows["p-value of a sign test"] == "none"
    rows = dict(stage_figures(of_stage("mechanism_audit"), RUN.recipe))
    bound = rows["lower bound from 100,000 canaries in and as many out"]
    assert bound == "0.012 (0.011 expected of a correct mechanism)"
    assert rows["largest change of the sums by one unit"] == "1.000000 C"
    noise = rows["standard deviation of the noise, as a share of the claim"]
    assert noise == "100.21% (of a correct mechanism: 99.71% to 100.29%)"
    rows = dict(stage_figures(of_stage("mia_audit", power=None, detectable_advantage=None), RUN.recipe))
    assert rows["TPR at 0.1% FPR (no false positive)"] == "1.2 ± 1.0%"
    assert rows["advantage detected with 80% power"] == "none"
    assert rows["power to detect the largest advantage under the guarantee"] == "no guarantee"


def test_a_single_seed_or_split_has_no_spread() -> None:
    once = {
        "finetune_eval": RUN.recipe.finetune_eval.model_copy(update={"seeds": (0,)}),
        "mia_audit": RUN.recipe.mia_audit.model_copy(update={"runs": 1}),
    }
    recipe = RUN.recipe.model_copy(update=once)
    for stage in once:
        record = RUN.stage(stage)
        shown = [stage_result(record, recipe), *(value for _, value in stage_figures(record, recipe))]
        assert not [text for text in shown if "±" in text]


def test_accuracies_start_before_fine_tuning_with_the_synthetic_texts_next() -> None:
    figures = dict(reversed(RUN.stage("finetune_eval").figures.items()))
    assert accuracy_rows(figures, RUN.recipe) == [
        ("nothing (before)", "60.3%", "–", "–", "–"),
        ("synthetic texts", "71.3 ± 1.2%", "72.2 ± 1.1%", "0.0001", "200"),
        ("real texts", "73.8 ± 1.0%", "74.4 ± 1.0%", "3e-05", "200"),
    ]


def test_verdict_has_the_texts_the_guarantee_and_both_evaluations() -> None:
    found = dict(verdict(RUN))
    assert found["texts"] == "20 left of 40: 10 negative, 10 positive"
    assert found["privacy"] == RUN.guarantee.sentence
    assert found["fine-tuning"] == RESULTS["finetune_eval"]
    assert found["membership inference"] == RESULTS["mia_audit"]


@pytest.mark.parametrize(("stage", "name"), [("finetune_eval", "accuracy_real_std"), ("mia_audit", "auc")])
def test_missing_figure_is_an_error_that_names_it(stage: str, name: str) -> None:
    record = of_stage(stage)
    incomplete = record.model_copy(update={"figures": {k: v for k, v in record.figures.items() if k != name}})
    with pytest.raises(KeyError, match=name):
        stage_result(incomplete, RUN.recipe)


def test_purposes_are_short_lines() -> None:
    assert all(0 < len(line) < 115 and line[0].islower() and line[-1] != "." for line in STAGES.values())
