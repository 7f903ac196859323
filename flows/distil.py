"""The main flow, `gradmm`: from private labelled texts to a release folder of synthetic sentences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from gradmm.config.loading import validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.errors import BudgetExhausted, InputError
from gradmm.evaluation.arm import Arm
from gradmm.flows.contamination import contamination_inputs
from gradmm.flows.finetune_plan import Trial, repeating, searching
from gradmm.flows.pipeline import TargetContext, release_target, stage_runs, synthetic_texts
from gradmm.flows.runtime.deployed import (
    check_root,
    end_with_server,
    over_deployment,
    shorten_refusals,
    tag_run,
)
from gradmm.flows.runtime.recipe_parameters import takes_recipe
from gradmm.flows.runtime.run_names import timed_name
from gradmm.flows.runtime.stage_runs import StageRuns
from gradmm.flows.runtime.ui_logs import logs_in_ui
from gradmm.flows.ui.artifacts import UiArtifacts
from gradmm.metrics.resemblance import Resemblance, resemblance
from gradmm.outputs.folder import write_run
from gradmm.outputs.record import RunRecord, library_versions
from gradmm.privacy.release_plan import release_plan
from gradmm.storage.artifacts import Root, StageArtifact
from gradmm.storage.location import Location, location
from gradmm.storage.redaction import redact_errors
from gradmm.tasks.contamination import contamination as contamination_stage
from gradmm.tasks.finetune_eval import arm_eval
from gradmm.tasks.finetune_eval import finetune_eval as finetune_eval_stage
from gradmm.tasks.memorisation import memorisation as memorisation_stage
from gradmm.tasks.mia_audit import mia_audit as mia_audit_stage
from gradmm.tasks.runtime.inputs import demo_material, read_split
from gradmm.tasks.runtime.privacy_budget import composed_guarantee
from gradmm.tasks.runtime.registry import RUN_STAGES
from gradmm.tasks.runtime.stage_task import SplitReference


@flow(
    name="gradmm",
    flow_run_name=lambda: timed_name(flow_run.parameters.get("name", "gradmm")),
    persist_result=False,
    result_serializer="json",
    # A part of a block is valid only with the rest, which the deployment has: the recipe is validated as a whole.
    validate_parameters=False,
)
@takes_recipe
def distil(
    *, root: Location = Path("gradmm-root"), force: tuple[str, ...] = (), **blocks: Any
) -> RunRecord | State:
    """Distil a labelled data set into readable synthetic sentences.

    The other parameters are the blocks of a recipe. A run of a deployment may give part of a block; the deployment
    supplies the rest.

    The run ends in the state `Unchanged` if its result was cached, and in `BudgetExhausted` if the privacy budget
    does not allow its release. A caller in the same process gets the record or the error in these states too.

    Args:
        root: Folder, or URL in an object store, that holds stages and runs. Absolute in a run of a deployment.
        force: Stages to run again even if cached. A charged noisy target cannot be forced; privacy.redraw draws
            one in every run.
    """
    end_with_server()
    shorten_refusals()
    recipe = validate_recipe(over_deployment(blocks), where="the flow's parameters")
    try:
        root = location(root)
    except ValueError as error:
        raise InputError(str(error), "root", "give a folder, or a URL such as s3://bucket/prefix") from error
    check_root(root)
    tag_run(recipe)
    try:
        with logs_in_ui():
            record = run_recipe(recipe, root, tuple(force))
    except BudgetExhausted as error:
        UiArtifacts(recipe, release_plan(recipe), Root(path=root)).show_refusal(error)
        return Failed(name="BudgetExhausted", message=str(error), data=error)
    if record.unchanged:
        return Completed(name="Unchanged", message="Everything was cached.", data=record)
    return record


def run_recipe(recipe: Recipe, root_path: Location, force: Sequence[str]) -> RunRecord:
    """Run all stages of a recipe that are not cached under the root, and write the run's folder.

    Raises:
        InputError: for a stage in `force` that no run has.
    """
    if unknown := sorted(set(force) - set(RUN_STAGES)):
        raise InputError(f"no stage {unknown[0]!r}", "force", f"choose from {', '.join(RUN_STAGES)}")
    started, start_time = datetime.now(UTC), time.perf_counter()
    root = Root(path=root_path.resolve())
    root.prepare()
    user_recipe, recipe = recipe, demo_material(recipe, root)
    runs = stage_runs(user_recipe, recipe, root, force)
    target_context = release_target(runs, recipe)
    texts = synthetic_texts(runs, recipe, target_context)
    evaluation = fine_tune(runs, recipe, target_context, texts)
    audited = {
        "texts": texts,
        "members": target_context.data.train,
        "non_members": target_context.data.validation,
        "rows_per_unit": recipe.privacy.max_rows_per_unit,
        "seed": recipe.seed,
    }
    mechanism = runs.plan.mechanism
    audit = runs.run(
        mia_audit_stage,
        **audited,
        model=target_context.model,
        prompt_template=target_context.prompt_template,
        learning_rate=evaluation.figures["learning_rate_synthetic"],
        steps=evaluation.figures["steps_synthetic"],
        finetuning=recipe.finetune_eval,
        settings=recipe.mia_audit,
        epsilon=mechanism and mechanism.epsilon,
        delta=mechanism and mechanism.delta,
    )
    runs.run(memorisation_stage, **audited)
    runs.include(
        contamination_stage, **contamination_inputs(target_context.data, target_context.model, recipe.seed)
    )
    record = RunRecord(
        run_id=f"{started:%Y%m%dT%H%M%SZ}-{recipe.name}",
        recipe=user_recipe,
        plan=runs.plan,
        guarantee=composed_guarantee(recipe.privacy, runs.plan, runs.context),
        data=target_context.data.model_dump(mode="json"),
        model=target_context.model.model_dump(mode="json"),
        started=started,
        seconds=time.perf_counter() - start_time,
        versions=library_versions(),
        stages=runs.records,
    )
    compared = redact_errors(
        lambda: compare_with_real(runs, target_context.data.train, texts, recipe.seed), "report", root.errors
    )
    record = write_run(root, record, texts=texts, evaluation=evaluation, audit=audit, compared=compared)
    runs.ui.show_run(record)
    return record


def compare_with_real(runs: StageRuns, real: SplitReference, texts: StageArtifact, seed: int) -> Resemblance:
    """Compare the texts with as many real ones, for the private report only. Nothing of it is stored elsewhere."""
    return resemblance(texts.read()["text"].tolist(), read_split(runs.context, real).texts, seed)


def fine_tune(
    runs: StageRuns, recipe: Recipe, target_context: TargetContext, texts: StageArtifact
) -> StageArtifact:
    """Evaluate the model before fine-tuning, then fine-tuned on the texts and on as many random train rows.

    Both have the same number of rows of each class. Fine-tuning is repeated with every seed.
    """
    settings = recipe.finetune_eval
    counts = Counter(texts.read()["written_for"].tolist())
    plan = [
        [Trial(target_context, Arm("before", "nothing"), None, {}, settings.seeds[0])],
        *(
            [Trial(target_context, arm, made, counts, seed) for seed in settings.seeds]
            for arm, made in ((Arm("synthetic", "synthetic"), texts), (Arm("real", "train"), None))
        ),
    ]
    return runs.run_sharded(
        arm_eval,
        finetune_eval_stage,
        searching(plan, settings),
        recipe.execution,
        lambda searched: list(chain.from_iterable(repeating(plan, settings, searched))),
    )
