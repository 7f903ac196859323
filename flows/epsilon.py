"""The flow `epsilon`: what the noise of each guarantee costs (the paper's Figure 3c)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import all_texts, check_epsilons
from gradmm_core.arms import ARMS, EPSILONS, PRODUCT, private_arm
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.epsilon import epsilon as epsilon_stage


@flow(name="gradmm-epsilon", persist_result=False, result_serializer="json")
def epsilon(
    recipe: Recipe,
    root: Location = Path("gradmm-root"),
    epsilons: tuple[float, ...] = EPSILONS,
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Texts under each guarantee and without noise, and the texts that the model writes without data.

    Args:
        recipe: without privacy; `privacy.budget_epsilon` has to allow all releases together.
        epsilons: each is one release from the data.
    """
    with logs_in_ui():
        epsilons = tuple(sorted(set(epsilons)))
        check_epsilons(recipe, epsilons)
        study = Study("epsilon", recipe, root, command)
        clean, size = study.aim.target, all_texts(recipe)
        # All releases first: one that the budget refuses is to be told before hours of work.
        private = {private_arm(each): study.private(each) for each in epsilons}
        made = {
            ARMS["before"]: None,
            ARMS["zero-shot"]: study.made(ARMS["zero-shot"]),
            ARMS[PRODUCT]: study.product.texts,
            **{arm: its.texts for arm, its in private.items()},
        }
        plan = [trials for arm, texts in made.items() for trials in study.trials(arm, texts, [size])]
        flat = [one for each in study.evaluate(plan) for one in each]
        study.runs.run(
            epsilon_stage,
            clean=clean,
            epsilons={arm.name: each for arm, each in zip(private, epsilons, strict=True)},
            targets=[its.aim.target for its in private.values()],
            evaluations=flat,
            measures=[study.measures(arm, texts, [size]) for arm, texts in made.items() if texts is not None],
        )
        guarantees = {arm.name: its.guarantee for arm, its in private.items()}
        return study.finish([arm.name for arm in made], [size], guarantees)
