"""The flow `bounds`: the lemma and the theorem of `gradmm_core.gradient_path` beside what happens."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.gradient_paths import run_path_study
from gradmm_core.arms import ARMS_OF
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.bounds import bounds as bounds_stage


@flow(name="gradmm-bounds", persist_result=False, result_serializer="json")
def bounds(
    recipe: Recipe,
    learning_rate: float,
    real_rows: int,
    root: Location = Path("gradmm-root"),
    arms: tuple[str, ...] = ARMS_OF["bounds"],
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Along fine-tuning on each arm's own texts, what bounds the gap of gradients and of losses, and both gaps.

    The arguments are those of `run_path_study`.
    """
    return run_path_study(bounds_stage, recipe, root, arms, learning_rate, real_rows, command)
