"""The main flow: from private labelled texts to a folder of synthetic sentences, stage by stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prefect import State, flow
from prefect.states import Completed, Failed

from flows.deployed import with_the_deployments
from flows.stage_runs import StageRuns
from flows.ui_artifacts import UiArtifacts
from flows.ui_logs import logs_in_ui
from gradmm_core import settings as s
from gradmm_core.artifacts import Root, StageArtifact
from gradmm_core.errors import BudgetExhausted
from gradmm_core.location import Location
from gradmm_core.model_reference import ModelReference
from gradmm_core.preflight import expected_cosines, preflight_lines
from gradmm_core.privacy import GaussianMechanism, gaussian_mechanism
from gradmm_core.recipe import Recipe, validate_recipe
from gradmm_core.run_folder import write_run
from gradmm_core.run_record import RunRecord, library_versions
from gradmm_core.shards import plan_shards
from gradmm_core.wording import ResponseTemplate
from tasks.category_balance import category_balance as category_balance_stage
from tasks.finetune_eval import finetune_eval as finetune_eval_stage
from tasks.generation import generation as generation_stage
from tasks.generation import generation_shard
from tasks.inputs import DataReference, dataset_fingerprint, demo_material, model_fingerprint
from tasks.label_filter import label_filter as label_filter_stage
from tasks.loss_selection import loss_selection as loss_selection_stage
from tasks.mechanism_audit import mechanism_audit as mechanism_audit_stage
from tasks.memorisation import memorisation as memorisation_stage
from tasks.mia_audit import mia_audit as mia_audit_stage
from tasks.privacy_budget import check_charged, composed_guarantee, privacy_budget
from tasks.stage import RunContext
from tasks.target_gradient import target_gradient as target_gradient_stage
from tasks.target_space import target_space as target_space_stage

logger = logging.getLogger("gradmm_core.flow")


@flow(name="gradmm", persist_result=False)
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
        label_filter: Drops texts that the model takes for another class.
        loss_selection: Keeps the texts that match best.
        category_balance: Evens out how well the classes match.
        finetune_eval: Fine-tuning on the synthetic texts, and on as many real ones.
        mechanism_audit: Canaries through the noise of a private run, before any data are read.
        mia_audit: Membership inference against the model fine-tuned on the synthetic texts.
        seed: Of everything but the noise.
        execution: Where generation's shards run.
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
    root = Root(path=root_path.expanduser().resolve())
    root.prepare()
    asked, recipe = recipe, demo_material(recipe, root)
    runs = stage_runs(asked, recipe, root, force)
    aim = release_target(runs, recipe)
    balanced = synthetic_texts(runs, recipe, aim)
    return measure_texts(runs, asked, recipe, aim, balanced, began, clock)


def stage_runs(asked: Recipe, recipe: Recipe, root: Root, force: Sequence[str] = ()) -> StageRuns:
    """Runs stages of a recipe; `asked` is the recipe before the demo's folders were put in."""
    context = RunContext(
        root=root,
        recipe=recipe.name,
        data=recipe.data,
        labels=tuple(c.label for c in recipe.classes),
        seed=recipe.seed,
        device=recipe.model.device,
        threads=recipe.execution.threads,
        force=tuple(force),
        budget_epsilon=recipe.privacy.budget_epsilon or recipe.privacy.epsilon,
        ledger=asked.ledger,
    )
    ui = UiArtifacts(recipe, root)
    return StageRuns(context, ui)


@dataclass(frozen=True)
class Aim:
    """What synthetic texts are to match, and all that it was made of."""

    model: ModelReference
    wording: ResponseTemplate
    mechanism: GaussianMechanism | None
    space: StageArtifact | None
    data: DataReference
    target: StageArtifact


def release_target(runs: StageRuns, recipe: Recipe) -> Aim:
    """The target, charged to the ledger and audited in a private run. The first that reads the data."""
    context = runs.context
    model = model_fingerprint(recipe.model)
    wording = response_template(recipe)
    mechanism = gaussian_mechanism(recipe.privacy)
    space = public_space(runs, recipe, model, wording, mechanism)
    making = {
        "space": space,
        "model": model,
        "wording": wording,
        "settings": recipe.target_gradient,
        "clipping_norm": recipe.privacy.clipping_norm,
        "mechanism": mechanism,
    }
    if mechanism and mechanism.safe:
        privacy_budget(context, making)
        runs.run(mechanism_audit_stage, mechanism=mechanism, settings=recipe.mechanism_audit, seed=recipe.seed)
    data = dataset_fingerprint(context)

    target = runs.run(target_gradient_stage, train=data.train, **making)
    if mechanism and mechanism.safe:
        check_charged(context, target)
    return Aim(model, wording, mechanism, space, data, target)


def synthetic_texts(runs: StageRuns, recipe: Recipe, aim: Aim) -> StageArtifact:
    """Texts that match the aim, as the recipe has them generated and filtered."""
    return filtered_texts(runs, recipe, aim, generated_texts(runs, recipe, aim))


def generated_texts(runs: StageRuns, recipe: Recipe, aim: Aim) -> StageArtifact:
    """Texts that match the aim, before any filter."""
    context, model, wording, space, target = runs.context, aim.model, aim.wording, aim.space, aim.target
    shards = plan_shards(list(context.labels), recipe.generation.per_class, recipe.generation.shard_size)
    categories = {c.label: c for c in recipe.classes}
    return runs.run_sharded(
        generation_shard,
        generation_stage,
        [
            {
                "target": target,
                "space": space,
                "model": model,
                "wording": wording,
                "category": categories[shard.label],
                "shard": shard,
                "text_tokens": text_tokens(recipe, shard.label, target),
                "records": records(recipe, shard.label, target),
                "matching": recipe.target_gradient,
                "settings": recipe.generation,
                "seed": recipe.seed,
            }
            for shard in shards
        ],
        recipe.execution,
    )


def filtered_texts(runs: StageRuns, recipe: Recipe, aim: Aim, generated: StageArtifact) -> StageArtifact:
    """What all filters leave."""
    context, model, wording, space, target = runs.context, aim.model, aim.wording, aim.space, aim.target
    of_their_class = runs.run(
        label_filter_stage, texts=generated, model=model, wording=wording, settings=recipe.label_filter
    )
    selected = runs.run(
        loss_selection_stage,
        texts=of_their_class,
        target=target,
        space=space,
        model=model,
        wording=wording,
        records={label: records(recipe, label, target) for label in context.labels},
        matching=recipe.target_gradient,
        settings=recipe.loss_selection,
    )
    return runs.run(category_balance_stage, texts=selected, settings=recipe.category_balance)


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
    evaluation = runs.run(
        finetune_eval_stage,
        texts=balanced,
        train=data.train,
        validation=data.validation,
        test=data.test,
        model=model,
        wording=wording,
        settings=recipe.finetune_eval,
    )
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


def public_space(
    runs: StageRuns,
    recipe: Recipe,
    model: ModelReference,
    wording: ResponseTemplate,
    mechanism: GaussianMechanism | None,
) -> StageArtifact | None:
    """Where the target lives; None where nothing public decides it. Private runs are told what to expect of it."""
    settings = recipe.target_gradient
    if not (settings.uses_public_text or mechanism):
        return None
    space = runs.run(
        target_space_stage,
        model=model,
        wording=wording,
        instructions={c.label: c.instruction for c in recipe.classes},
        settings=settings,
        clipping_norm=recipe.privacy.clipping_norm,
    )
    if mechanism and recipe.privacy.declared_records:
        expected = expected_cosines(mechanism, space.figures, recipe.privacy.declared_records)
        for line in preflight_lines(expected, {c.label: c.name for c in recipe.classes}):
            logger.info("%s", line)
    return space if settings.uses_public_text else None


def response_template(recipe: Recipe) -> ResponseTemplate:
    """The part of the recipe that decides an example's tokens."""
    return ResponseTemplate(
        suffix=recipe.template.suffix,
        verbalisers={c.label: c.verbaliser for c in recipe.classes},
        max_text_tokens=recipe.template.max_text_tokens,
    )


def text_tokens(recipe: Recipe, label: int, target: StageArtifact) -> int:
    """n, the length of a class's texts: the recipe's, or the mean of its real texts."""
    if recipe.generation.text_tokens == "auto":
        return max(1, round(target.figures["text_tokens"][str(label)]))
    return recipe.generation.text_tokens


def records(recipe: Recipe, label: int, target: StageArtifact) -> float | None:
    """How many records a class has: by declaration in a private run. None if texts match the target as it is."""
    if not recipe.target_gradient.centred or recipe.generation.matches == "difference":
        return None
    if recipe.privacy.epsilon is None:
        return float(target.figures["records"][str(label)])
    assert recipe.privacy.declared_records is not None  # the recipe's validation asked for it
    return recipe.privacy.declared_records / len(recipe.classes)
