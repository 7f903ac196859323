"""The stages from a recipe to its filtered synthetic texts, shared by all flows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradmm.config.extras import check_extras
from gradmm.config.recipe import Recipe
from gradmm.data.splits import check_splits
from gradmm.filters.rows import filters_by_probe
from gradmm.flows.runtime.shard_runners import check_cluster
from gradmm.flows.runtime.stage_runs import StageRuns
from gradmm.flows.ui.artifacts import UiArtifacts
from gradmm.generation.per_class import class_records, text_tokens, tilts_words
from gradmm.generation.shards import plan_shards
from gradmm.labelling.labelling import uses_release
from gradmm.labelling.release_warnings import release_warnings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.ledger import budget_of
from gradmm.privacy.release_plan import ReleasePlan, release_plan
from gradmm.storage.artifacts import Root, StageArtifact
from gradmm.target.preflight import delta_warning, expected_cosines, preflight_lines
from gradmm.tasks.category_balance import category_balance as category_balance_stage
from gradmm.tasks.generation import generation as generation_stage
from gradmm.tasks.generation import generation_shard
from gradmm.tasks.label_filter import label_filter as label_filter_stage
from gradmm.tasks.labelling import labelling as labelling_stage
from gradmm.tasks.loss_selection import loss_selection as loss_selection_stage
from gradmm.tasks.mechanism_audit import mechanism_audit as mechanism_audit_stage
from gradmm.tasks.runtime.input_checks import check_kept, check_records, model_check
from gradmm.tasks.runtime.inputs import DataReference, dataset_fingerprint, drawn_rows, model_fingerprint
from gradmm.tasks.runtime.privacy_budget import check_charged, count_records, privacy_budget
from gradmm.tasks.runtime.stage_task import RunContext
from gradmm.tasks.target_gradient import planned_release
from gradmm.tasks.target_gradient import target_gradient as target_gradient_stage
from gradmm.tasks.target_space import target_space as target_space_stage
from gradmm.tasks.word_tilt import word_tilt as word_tilt_stage

logger = logging.getLogger("gradmm.flow")


def stage_runs(user_recipe: Recipe, recipe: Recipe, root: Root, force: Sequence[str] = ()) -> StageRuns:
    """Prepare to run the stages of a recipe.

    Args:
        user_recipe: the recipe before `demo_material` put in the demo's folders; it names the ledger.
        force: stages to run again even if cached.
    """
    check_extras(recipe)  # before anything is computed
    check_cluster(recipe.execution)
    plan = release_plan(recipe)
    redraw = plan.charged and recipe.privacy.redraw
    context = RunContext(
        root=root,
        recipe=recipe.name,
        data=recipe.data,
        labels=tuple(c.label for c in recipe.classes),
        seed=recipe.seed,
        device=recipe.model.device,
        threads=recipe.execution.threads,
        force=(*force, target_gradient_stage.name) if redraw else tuple(force),
        budget=plan.mechanism and budget_of(recipe.privacy, plan.mechanism),
        ledger=user_recipe.ledger,
        unit_column=recipe.privacy.unit_column,
        redraw=redraw,
    )
    return StageRuns(context, plan, UiArtifacts(recipe, plan, root))


@dataclass(frozen=True)
class TargetContext:
    """The target of synthetic texts, and the inputs that it was computed from."""

    model: ModelReference
    prompt_template: PromptTemplate
    plan: ReleasePlan
    space: StageArtifact | None
    data: DataReference
    target: StageArtifact

    def inputs(self, *splits: str) -> dict[str, Any]:
        """Return the inputs that stages have in common: splits of the data, the model and the prompt template."""
        data = {split: getattr(self.data, split) for split in splits}
        return data | {"model": self.model, "prompt_template": self.prompt_template}

    @property
    def matching_inputs(self) -> dict[str, Any]:
        """Inputs shared by the stages that compare texts with the target."""
        return {
            "target": self.target,
            "space": self.space,
            "model": self.model,
            "prompt_template": self.prompt_template,
            "clipping_norm": self.plan.clipping_norm,
            "matching": self.plan.target,
        }


def release_target(runs: StageRuns, recipe: Recipe, drawn: tuple[int, int] | None = None) -> TargetContext:
    """Compute the target. In a private run, audit the mechanism and charge the release to the ledger.

    No earlier stage computes anything from private data.

    Args:
        drawn: number of random train rows to use instead of all, and the seed that draws them. Not allowed in a
            private run, because the draw depends on all rows.
    """
    context, plan = runs.context, runs.plan
    check_splits(context.data)
    model = model_fingerprint(recipe.model)
    prompt_template = PromptTemplate.of(recipe)
    public_inputs: dict[str, Any] = {
        "model": model,
        "prompt_template": prompt_template,
        "settings": plan.target,
        "clipping_norm": plan.clipping_norm,
        "mechanism": plan.mechanism,
    }
    if recipe.privacy.unit_column is not None:  # a new input would change the keys of all other targets
        public_inputs["rows_per_unit"] = recipe.privacy.rows_per_unit
    # The target space takes long, so the model is checked before; in a run without noise, the data too. A private
    # run needs the space to know whether this is another release, and refuses one without reading the data.
    unseen = _uses_space(plan) and runs.found(target_space_stage, **space_inputs(runs, recipe, model)) is None
    if unseen:
        model_check(context, recipe, model, prompt_template)
    if plan.charged:
        space = public_space(runs, recipe, model)
        if privacy_budget(context, public_inputs | {"space": space}) and not unseen:
            model_check(context, recipe, model, prompt_template)
        runs.run(
            mechanism_audit_stage,
            mechanism=plan.mechanism,
            target=plan.target,
            settings=recipe.mechanism_audit,
            seed=recipe.seed,
        )
    data = dataset_fingerprint(context)
    check_records(data)
    if drawn:
        assert plan.mechanism is None
        data = data.model_copy(update={"train": drawn_rows(context, data.train, *drawn)})
    if not plan.charged:
        space = public_space(runs, recipe, model)
    inputs: dict[str, Any] = public_inputs | {"space": space}
    if plan.charged:
        made = not context.redraw and runs.found(target_gradient_stage, train=data.train, **inputs)
        count_records(context, data.train, None if made else planned_release(context, **inputs))
    target = runs.run(target_gradient_stage, train=data.train, **inputs)
    if plan.charged:
        check_charged(context, target)
    return TargetContext(model, prompt_template, plan, space, data, target)


def synthetic_texts(runs: StageRuns, recipe: Recipe, target_context: TargetContext) -> StageArtifact:
    """Generate texts, filter and label them."""
    generated = generated_texts(runs, recipe, target_context)
    return labelled_texts(runs, recipe, target_context, filtered_texts(runs, recipe, target_context, generated))


def generated_texts(runs: StageRuns, recipe: Recipe, target_context: TargetContext) -> StageArtifact:
    """Generate texts without filtering them."""
    settings, target, tilt = recipe.generation, target_context.target, fitted_words(runs, recipe, target_context)
    shards = plan_shards(list(runs.context.labels), settings.per_class, settings.examples_per_shard)
    categories = {c.label: c for c in recipe.classes}

    def matched(label: int) -> dict[str, Any]:
        if settings.method == "written":
            return {"model": target_context.model, "prompt_template": target_context.prompt_template}
        return target_context.matching_inputs | {"records": class_records(recipe, label, target)}

    return runs.run_sharded(
        generation_shard,
        generation_stage,
        [
            {
                **matched(shard.label),
                "word_tilt": tilt,
                "category": categories[shard.label],
                "shard": shard,
                "text_tokens": text_tokens(recipe, shard.label, target),
                "settings": settings,
                "seed": recipe.seed,
            }
            for shard in shards
        ],
        recipe.execution,
    )


def fitted_words(runs: StageRuns, recipe: Recipe, target_context: TargetContext) -> StageArtifact | None:
    """Fit the tilt of words; None if no token rates were released, or if no words are sampled."""
    plan = target_context.plan
    if not tilts_words(recipe, plan.target):
        return None
    return runs.run(
        word_tilt_stage,
        target=target_context.target,
        space=target_context.space,
        model=target_context.model,
        prompt_template=target_context.prompt_template,
        matching=plan.target,
        categories=list(recipe.classes),
        text_tokens={c.label: text_tokens(recipe, c.label, target_context.target) for c in recipe.classes},
        settings=recipe.word_tilt,
        generation=recipe.generation,
        seed=recipe.seed,
    )


def filtered_texts(
    runs: StageRuns, recipe: Recipe, target_context: TargetContext, generated: StageArtifact
) -> StageArtifact:
    """Apply all filters to generated texts. The result has the columns `kept` and `reason`.

    Raises:
        InputError: if a filter drops all texts of a label.
    """
    target, charged = target_context.target, target_context.plan.charged
    judged = filters_by_probe(recipe, target_context.plan.target)
    label_filtered = runs.run(
        label_filter_stage,
        texts=generated,
        model=target_context.model,
        prompt_template=target_context.prompt_template,
        settings=recipe.label_filter,
        target=target if judged else None,
        space=target_context.space if judged else None,
    )
    selected = runs.run(
        loss_selection_stage,
        **target_context.matching_inputs,
        texts=check_kept(label_filtered, charged),
        records={label: class_records(recipe, label, target) for label in runs.context.labels},
        loss=recipe.generation.loss,
        probe_weight=recipe.generation.probe_weight,
        settings=recipe.loss_selection,
    )
    balanced = runs.run(
        category_balance_stage, texts=check_kept(selected, charged), settings=recipe.category_balance
    )
    return check_kept(balanced, charged)


def labelled_texts(
    runs: StageRuns, recipe: Recipe, target_context: TargetContext, filtered: StageArtifact
) -> StageArtifact:
    """Give each text that the filters kept its class probabilities."""
    matching = target_context.plan.target
    released = uses_release(recipe.labelling, matching)
    return runs.run(
        labelling_stage,
        texts=filtered,
        model=target_context.model,
        prompt_template=target_context.prompt_template,
        class_names=recipe.class_names,
        instructions=recipe.instructions,
        matching=matching,
        settings=recipe.labelling,
        target=target_context.target if released else None,
        space=target_context.space if released else None,
    )


def space_inputs(runs: StageRuns, recipe: Recipe, model: ModelReference) -> dict[str, Any]:
    """Return the inputs of the stage `target_space`."""
    return {
        "model": model,
        "prompt_template": PromptTemplate.of(recipe),
        "instructions": recipe.instructions,
        "settings": runs.plan.target,
        "clipping_norm": runs.plan.norms.gradient,
    }


def _uses_space(plan: ReleasePlan) -> bool:
    """Return whether a run computes a target space: for its target, or to predict its noise."""
    return plan.target.uses_public_text or plan.mechanism is not None


def public_space(runs: StageRuns, recipe: Recipe, model: ModelReference) -> StageArtifact | None:
    """Compute the target space from public text, or return None if the target does not use one.

    In a private run, log the expected cosines of the target, which need the space's figures.
    """
    plan = runs.plan
    if not _uses_space(plan):
        return None
    space = runs.run(target_space_stage, **space_inputs(runs, recipe, model))
    for line in release_warnings(recipe, plan):
        logger.info("%s", line)
    if plan.mechanism and plan.declared_records:
        expected = expected_cosines(plan.mechanism, plan.norms, space.figures, plan.declared_records)
        for line in preflight_lines(expected, recipe.class_names):
            logger.info("%s", line)
        if warning := delta_warning(recipe.privacy):
            logger.info("%s", warning)
    return space if plan.target.uses_public_text else None
