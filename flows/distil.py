"""The main flow: from private labelled texts to a folder of synthetic sentences, stage by stage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from prefect import State, flow
from prefect.states import Completed, Failed

from flows.deployed import with_the_deployments
from flows.stage_runs import StageRuns
from flows.texts import Aim, release_target, stage_runs, synthetic_texts
from flows.trials import Trial, repeating, searching
from flows.ui_artifacts import UiArtifacts
from flows.ui_logs import logs_in_ui
from gradmm_core import settings as s
from gradmm_core.arms import ARMS, Arm
from gradmm_core.artifacts import Root, StageArtifact
from gradmm_core.errors import BudgetExhausted
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe, validate_recipe
from gradmm_core.run_folder import write_run
from gradmm_core.run_record import RunRecord, library_versions
from tasks.arm_eval import arm_eval
from tasks.finetune_eval import finetune_eval as finetune_eval_stage
from tasks.inputs import demo_material
from tasks.memorisation import memorisation as memorisation_stage
from tasks.mia_audit import mia_audit as mia_audit_stage
from tasks.privacy_budget import composed_guarantee


@flow(name="gradmm", persist_result=False, result_serializer="json")
def distil(
    name: str,
    data: s.DataSettings,
    classes: tuple[s.ClassSettings, ...],
    model: s.ModelSettings,
    root: Location = Path("gradmm-root"),
    force: tuple[str, ...] = (),
    description: str = "",
    template: s.TemplateSettings = s.TemplateSettings(),
    privacy: s.PrivacySettings = s.PrivacySettings(),
    target_gradient: s.TargetGradientSettings = s.TargetGradientSettings(),
    generation: s.GenerationSettings = s.GenerationSettings(),
    label_filter: s.LabelFilterSettings = s.LabelFilterSettings(),
    loss_selection: s.LossSelectionSettings = s.LossSelectionSettings(),
    category_balance: s.CategoryBalanceSettings = s.CategoryBalanceSettings(),
    finetune_eval: s.FinetuneEvalSettings = s.FinetuneEvalSettings(),
    mechanism_audit: s.MechanismAuditSettings = s.MechanismAuditSettings(),
    mia_audit: s.MiaAuditSettings = s.MiaAuditSettings(),
    seed: int = 0,
    execution: s.ExecutionSettings = s.ExecutionSettings(),
) -> RunRecord | State[RunRecord]:
    """Distils a labelled data set into readable synthetic sentences.

    The parameters are a recipe's blocks, one for each stage. A run of a deployment may be given part of a block:
    what it leaves out is the deployment's.

    A run in which every stage was cached ends in the state `Unchanged`, and one that the privacy budget does not
    allow in `BudgetExhausted`. A caller in the same process gets the record, or the error, all the same.

    Args:
        name: The recipe's name.
        data: Where the labelled texts come from.
        classes: The classes, each with its label, its verbaliser and an instruction.
        model: The causal language model.
        root: The folder, or the URL in an object store, that keeps stages, runs and releases.
        force: Stages to run again even if cached. A noisy target drawn again is one more release.
        description: What the recipe is.
        template: How a text is turned into an example.
        privacy: The guarantee asked for.
        target_gradient: The gradient that the synthetic texts are to match.
        generation: How many texts, how long, and by which method.
        label_filter: Drops texts that the model and the probe take for another class.
        loss_selection: Keeps the texts that match best.
        category_balance: Evens out how well the classes match.
        finetune_eval: Fine-tuning on the synthetic texts, and on as many real ones.
        mechanism_audit: Canaries through the noise of a private run, before any data are read.
        mia_audit: Membership inference against the model fine-tuned on the synthetic texts.
        seed: Of everything but the noise.
        execution: Where generation's shards and the fine-tunings run.
    """
    blocks = {block: value for block, value in locals().items() if block in Recipe.model_fields}
    recipe = validate_recipe(with_the_deployments(blocks), where="the flow's parameters")
    try:
        with logs_in_ui():
            record = run_recipe(recipe, root, force)
    except BudgetExhausted as error:
        UiArtifacts(recipe, Root(path=root)).show_refusal(error)
        return Failed(name="BudgetExhausted", message=str(error), data=error)
    if all(stage.cached for stage in record.stages):
        return Completed(name="Unchanged", message="Every stage was there already.", data=record)
    return record


def run_recipe(recipe: Recipe, root_path: Location, force: Sequence[str]) -> RunRecord:
    """All stages of one recipe; what is cached is not run again."""
    began, clock = datetime.now(UTC), time.perf_counter()
    root = Root(path=root_path.resolve())
    root.prepare()
    asked, recipe = recipe, demo_material(recipe, root)
    runs = stage_runs(asked, recipe, root, force)
    aim = release_target(runs, recipe)
    balanced = synthetic_texts(runs, recipe, aim)
    return measure_texts(runs, asked, recipe, aim, balanced, began, clock)


def fine_tune(runs: StageRuns, recipe: Recipe, aim: Aim, balanced: StageArtifact) -> StageArtifact:
    """Fine-tunes on the texts and, of the same classes, on as many random train rows; with every seed."""
    settings = recipe.finetune_eval
    counts = Counter(balanced.read().query("kept")["label"].tolist())
    plan = [
        [Trial(aim, ARMS["before"], None, {}, settings.seeds[0])],
        *(
            [Trial(aim, arm, made, counts, seed) for seed in settings.seeds]
            for arm, made in ((Arm("synthetic", "synthetic"), balanced), (Arm("real", "train"), None))
        ),
    ]
    return runs.run_sharded(
        arm_eval,
        finetune_eval_stage,
        searching(plan, settings),
        recipe.execution,
        lambda searched: [each for trials in repeating(plan, settings, searched) for each in trials],
    )


def measure_texts(
    runs: StageRuns,
    asked: Recipe,
    recipe: Recipe,
    aim: Aim,
    balanced: StageArtifact,
    began: datetime,
    clock: float,
) -> RunRecord:
    """What the texts are worth and what they give away; and the run's folder."""
    context, ui, root = runs.context, runs.ui, runs.context.root
    model, wording, mechanism, data = aim.model, aim.wording, aim.mechanism, aim.data
    evaluation = fine_tune(runs, recipe, aim, balanced)
    audit = runs.run(
        mia_audit_stage,
        texts=balanced,
        members=data.train,
        non_members=data.validation,
        model=model,
        wording=wording,
        learning_rate=evaluation.figures["learning_rate_synthetic"],
        finetuning=recipe.finetune_eval,
        settings=recipe.mia_audit,
        epsilon=mechanism.epsilon if mechanism else None,
        delta=mechanism.delta if mechanism else None,
        seed=recipe.seed,
    )
    runs.run(
        memorisation_stage,
        texts=balanced,
        members=data.train,
        non_members=data.validation,
        seed=recipe.seed,
    )
    record = RunRecord(
        run_id=f"{began:%Y%m%dT%H%M%SZ}-{recipe.name}",
        recipe=asked,
        guarantee=composed_guarantee(recipe.privacy, context),
        data=data.model_dump(mode="json"),
        model=model.model_dump(mode="json"),
        started=began,
        seconds=time.perf_counter() - clock,
        versions=library_versions(),
        stages=runs.records,
    )
    record = write_run(root, record, texts=balanced, evaluation=evaluation, audit=audit)
    ui.show_run(record)
    return record
