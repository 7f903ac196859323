"""The flow `distribution`: how near the texts are to real ones (the paper's Table 3 and Figure 3b)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import all_texts, check_plan
from gradmm_core.arms import ARMS, ARMS_OF, PRODUCT
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.distribution import distribution as distribution_stage


@flow(name="gradmm-distribution", persist_result=False, result_serializer="json")
def distribution(
    recipe: Recipe,
    root: Location = Path("gradmm-root"),
    arms: tuple[str, ...] = ARMS_OF["distribution"],
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Distances of each arm's texts from test rows, as many as the filters let through. No fine-tuning.

    Args:
        arms: names of `gradmm_core.arms.ARMS` that have as many texts; the product's own is always among them.
    """
    with logs_in_ui():
        check_plan(recipe, [size := all_texts(recipe)], arms, [])
        study = Study("distribution", recipe, root, command)
        chosen = [arm for name, arm in ARMS.items() if name in (*arms, PRODUCT) and arm.sizes([size]) == [size]]
        made = [study.made(arm) for arm in chosen]
        aim = study.aim
        study.runs.run(
            distribution_stage,
            arms=chosen,
            made=[None if texts is None else texts[study.seeds[0]] for texts in made],
            measures=[study.measures(arm, texts, [size]) for arm, texts in zip(chosen, made, strict=True)],
            size=size,
            seed=study.seeds[0],
            train=aim.data.train,
            test=aim.data.test,
            model=aim.model,
            wording=aim.wording,
        )
        return study.finish([arm.name for arm in chosen], [size])
