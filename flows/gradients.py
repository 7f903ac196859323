"""The flow `gradients`: how far the gradients of synthetic texts are from real ones (the paper's Figure 3a)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.gradient_paths import gradient_paths
from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import all_texts, check_path
from gradmm_core.arms import ARMS_OF
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.gradients import gradients as gradients_stage


@flow(name="gradmm-gradients", persist_result=False, result_serializer="json")
def gradients(
    recipe: Recipe,
    learning_rate: float,
    real_rows: int,
    root: Location = Path("gradmm-root"),
    arms: tuple[str, ...] = ARMS_OF["gradients"],
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Along fine-tuning on each arm's own texts, the gradients of these and of real rows at the same parameters.

    Args:
        learning_rate: of every arm.
        real_rows: of the train split, drawn once.
        arms: names of `gradmm_core.arms.ARMS`; the product's own is always among them.
    """
    with logs_in_ui():
        check_path(recipe, arms, learning_rate, real_rows)
        study = Study("gradients", recipe, root, command)
        paths = gradient_paths(study, arms, learning_rate, real_rows)
        study.runs.run(gradients_stage, paths=[path for of_arm in paths.values() for path in of_arm])
        return study.finish(list(paths), [all_texts(recipe)])
