"""The flow `gradients`: how far the gradients of synthetic texts are from real ones (the paper's Figure 3a)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.gradient_paths import run_path_study
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

    The arguments are those of `run_path_study`.
    """
    return run_path_study(gradients_stage, recipe, root, arms, learning_rate, real_rows, command)
