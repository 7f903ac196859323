"""The flow `compare`: the product's texts against baselines, at several sizes (the paper's Table 1)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import check_plan, sizes_of
from gradmm_core.arms import ARMS, PRODUCT, private_arm
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.compare import compare as compare_stage


@flow(name="gradmm-compare", persist_result=False, result_serializer="json")
def compare(
    recipe: Recipe,
    root: Location = Path("gradmm-root"),
    sizes: tuple[int, ...] | None = None,
    arms: tuple[str, ...] = tuple(ARMS),
    epsilons: tuple[float, ...] = (),
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Fine-tunes on every arm at every size and with every seed, and tabulates what each is worth.

    Every seed of `finetune_eval.seeds` has texts generated anew, draws other random rows, and fine-tunes in
    another order. The target, and with it the noise, is the same for all: it is released once.

    Args:
        root: the folder, or the URL in an object store, that keeps stages and runs.
        sizes: how many texts, in all; by default the paper's, as far as the recipe can fill them. An arm's are the
            first of its own order, as evenly over the classes as it goes, so that one generation serves all sizes.
        arms: names of `gradmm_core.arms.ARMS`; the product's own is always among them.
        epsilons: the product's arm with these guarantees too, each of them one release from the data.
        command: what started it, for the record.
    """
    with logs_in_ui():
        sizes = tuple(sorted(set(sizes_of(recipe) if sizes is None else sizes)))
        epsilons = tuple(sorted(set(epsilons)))
        check_plan(recipe, sizes, arms, epsilons)
        study = Study("compare", recipe, root, command)
        # All releases first: one that the budget refuses is to be told before hours of work.
        _ = study.aim
        private = {epsilon: study.private(epsilon) for epsilon in epsilons}
        made = {arm: study.made(arm) for name, arm in ARMS.items() if name in (*arms, PRODUCT)}
        made |= {private_arm(epsilon): its.texts for epsilon, its in private.items()}
        plan = [trials for arm, texts in made.items() for trials in study.trials(arm, texts, sizes)]
        evaluations = study.evaluate(plan)
        measures = [
            study.measures(arm, texts, arm.sizes(sizes)) for arm, texts in made.items() if arm.source != "nothing"
        ]
        flat = [one for each in evaluations for one in each]
        study.runs.run(compare_stage, evaluations=flat, measures=measures)
        guarantees = {private_arm(epsilon).name: its.guarantee for epsilon, its in private.items()}
        return study.finish([arm.name for arm in made], sizes, guarantees)
