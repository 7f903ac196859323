"""The flow `scarce`: many synthetic texts made from few real rows, against these rows (the paper's Figure 1)."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import all_texts, check_few
from gradmm_core.arms import ARMS, FEW, PRODUCT, REAL_ROWS
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.scarce import scarce as scarce_stage


@flow(name="gradmm-scarce", persist_result=False, result_serializer="json")
def scarce(
    recipe: Recipe,
    root: Location = Path("gradmm-root"),
    few: tuple[int, ...] = FEW,
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Draws few real rows, makes as many texts from them as the recipe does, and fine-tunes on either.

    Every seed of `finetune_eval.seeds` draws other rows, has other texts generated, fine-tunes in another order.
    Validation and test rows are all there: the learning rate is chosen as with plenty of data, for all arms alike.

    Args:
        few: how many real rows, in all, as evenly over the classes as it goes. Fewer are the first of more.
    """
    with logs_in_ui():
        few = tuple(sorted(set(few)))
        check_few(recipe, few)
        study = Study("scarce", recipe, root, command)
        size, seeds = all_texts(recipe), study.seeds
        written = study.made(ARMS["zero-shot"])
        plan = [*study.trials(ARMS["before"], None, [0]), *study.trials(ARMS["zero-shot"], written, [size])]
        sizes = [0, size]
        for rows in few:
            versions = {seed: study.of_rows(rows, seed) for seed in seeds}
            plan.append([study.trial(its.aim, REAL_ROWS, None, rows, seed) for seed, its in versions.items()])
            product = ARMS[PRODUCT]
            plan.append(
                [study.trial(its.aim, product, its.texts[seed], size, seed) for seed, its in versions.items()]
            )
            sizes += [rows, rows]
        study.runs.run(scarce_stage, few=sizes, evaluations=study.evaluate(plan))
        return study.finish(["before", "zero-shot", REAL_ROWS.name, PRODUCT], few)
