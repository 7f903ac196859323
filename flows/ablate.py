"""The flow `ablate`: what each part of the product brings (the paper's Tables 4 and 5, and more)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.ablations import Ablation, ablated, check_ablations
from gradmm_core.arm_recipes import all_texts
from gradmm_core.arms import ARMS, PRODUCT, Arm
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.ablate import ablate as ablate_stage


@flow(name="gradmm-ablate", persist_result=False, result_serializer="json")
def ablate(
    recipe: Recipe,
    ablations: tuple[Ablation, ...],
    root: Location = Path("gradmm-root"),
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Fine-tunes on the recipe's texts and on those of each of its versions, as many as the filters let through.

    Args:
        ablations: in a private run, one that changes the target is one more release.
    """
    with logs_in_ui():
        check_ablations(recipe, ablations)
        study, size = Study("ablate", recipe, root, command), all_texts(recipe)
        made = {ARMS["before"]: None, ARMS[PRODUCT]: study.product.texts}
        generated = {PRODUCT: study.product.generated}
        versions = [(each, study.version(each.name, ablated(study.recipe, each))) for each in ablations]
        for ablation, its in versions:
            generated[ablation.name] = its.generated
            arm = Arm(ablation.name, "written" if ablation.unranked else "synthetic")
            made[arm] = its.texts
        plan = [trials for arm, texts in made.items() for trials in study.trials(arm, texts, [size])]
        study.runs.run(
            ablate_stage,
            arms=list(generated),
            generations=[list(each.values()) for each in generated.values()],
            evaluations=[one for each in study.evaluate(plan) for one in each],
            measures=[study.measures(arm, texts, [size]) for arm, texts in made.items() if texts is not None],
        )
        return study.finish([arm.name for arm in made], [size])
