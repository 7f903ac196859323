"""What the flows `gradients` and `bounds` share: gradients along the fine-tuning of every arm, with every seed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prefect import Task

from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import all_texts, check_path
from gradmm_core.arms import ARMS, PRODUCT
from gradmm_core.artifacts import StageArtifact
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.study_record import StudyRecord
from tasks.gradient_path import gradient_path
from tasks.inputs import drawn_rows

logger = logging.getLogger("gradmm_core.flow")

#: Draws the real rows. No recipe's seed is below zero: one would draw the arm `random`'s rows among the real ones.
REAL_SEED = -1


def run_path_study(
    stage: Task[..., StageArtifact],
    recipe: Recipe,
    root: Location,
    arms: Sequence[str],
    learning_rate: float,
    real_rows: int,
    command: Sequence[str],
) -> StudyRecord:
    """The study whose table `stage` makes of all paths, and which has its name.

    Args:
        arms: names of `gradmm_core.arms.ARMS`; the product's own is always among them.
        learning_rate: of every arm.
        real_rows: of the train split, drawn once.
    """
    with logs_in_ui():
        check_path(recipe, arms, learning_rate, real_rows)
        study = Study(stage.name, recipe, root, command)
        paths = _gradient_paths(study, arms, learning_rate, real_rows)
        study.runs.run(stage, paths=[path for of_arm in paths.values() for path in of_arm])
        return study.finish(list(paths), [all_texts(recipe)])


def _gradient_paths(
    study: Study, arms: Sequence[str], learning_rate: float, real_rows: int
) -> dict[str, list[StageArtifact]]:
    """Of each arm, the product's among them, a path for each seed: cached, whichever flow asks for it."""
    size, settings, aim = all_texts(study.recipe), study.recipe.finetune_eval, study.aim
    real = drawn_rows(study.runs.context, aim.data.train, real_rows, REAL_SEED)
    chosen = [arm for name, arm in ARMS.items() if name in (*arms, PRODUCT)]
    inputs = [
        {
            "arm": trial.arm,
            "made": trial.made,
            "size": size,
            "train": aim.data.train,
            "real": real,
            "model": aim.model,
            "wording": aim.wording,
            # All that decides a path: others would have it measured again for nothing.
            "settings": FinetuneEvalSettings(
                steps=settings.steps,
                batch_size=settings.batch_size,
                evaluate_every=settings.evaluate_every,
                learning_rates=(learning_rate,),
                seeds=(trial.seed,),
            ),
        }
        for arm in chosen
        for trials in study.trials(arm, study.made(arm), [size])
        for trial in trials
    ]
    paths: dict[str, list[StageArtifact]] = {arm.name: [] for arm in chosen}
    for asked, path in zip(
        inputs, study.quiet.run_each(gradient_path, inputs, study.recipe.execution), strict=True
    ):
        paths[asked["arm"].name].append(path)
    for name, (first, *_) in paths.items():
        if first.figures["texts"] < size:
            logger.warning("%s has %d texts fewer than %d", name, size - first.figures["texts"], size)
    return paths
