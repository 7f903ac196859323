"""The flow `transfer`: what texts made for one model are worth to others (the paper's Table 2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prefect import flow

from flows.study import Study
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import all_texts, check_models, check_plan
from gradmm_core.arms import ARMS, ARMS_OF, PRODUCT
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.study_record import StudyRecord
from tasks.inputs import model_fingerprint
from tasks.transfer import transfer as transfer_stage


@flow(name="gradmm-transfer", persist_result=False, result_serializer="json")
def transfer(
    recipe: Recipe,
    models: tuple[str, ...],
    root: Location = Path("gradmm-root"),
    arms: tuple[str, ...] = ARMS_OF["transfer"],
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Fine-tunes the recipe's model and others on the same texts, as many as the filters let through.

    Args:
        models: hub ids or folders, of causal language models. The recipe's dtype, device and trust are for all.
        arms: names of `gradmm_core.arms.ARMS`; the product's own is always among them.
    """
    with logs_in_ui():
        check_models(recipe, models)
        check_plan(recipe, [size := all_texts(recipe)], arms, [])
        study = Study("transfer", recipe, root, command)
        own = study.recipe.model
        names = {own.name: own} | {
            name: own.model_copy(update={"name": name, "revision": None}) for name in models
        }
        # All of them first: one that cannot be read is to be told before hours of work.
        references = {name: model_fingerprint(settings) for name, settings in names.items()}
        chosen = [ARMS[name] for name in ARMS if name in arms or name == PRODUCT]
        made = {arm: study.made(arm) for arm in chosen}
        plan, owners = [], []
        for name, reference in references.items():
            aim = replace(study.aim, model=reference)
            for arm, texts in made.items():
                for trials in study.trials(arm, texts, [size]):
                    plan.append([replace(trial, aim=aim) for trial in trials])
                    owners.append(name)
        evaluated = study.evaluate(plan)
        of_models = [
            [one for owner, each in zip(owners, evaluated, strict=True) for one in each if owner == name]
            for name in references
        ]
        study.runs.run(transfer_stage, models=list(references), evaluations=of_models)
        return study.finish([arm.name for arm in chosen], [size])
