"""From a recipe to its synthetic texts: what all flows have in common."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from flows.stage_runs import StageRuns
from flows.ui_artifacts import UiArtifacts
from gradmm_core.artifacts import Root, StageArtifact
from gradmm_core.model_reference import ModelReference
from gradmm_core.preflight import TOO_NOISY_FOR_A_PROBE, expected_cosines, preflight_lines, released_target
from gradmm_core.privacy import GaussianMechanism, gaussian_mechanism
from gradmm_core.recipe import Recipe
from gradmm_core.release_norms import ReleaseNorms
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.shards import plan_shards
from gradmm_core.wording import ResponseTemplate
from tasks.category_balance import category_balance as category_balance_stage
from tasks.generation import generation as generation_stage
from tasks.generation import generation_shard
from tasks.inputs import DataReference, dataset_fingerprint, drawn_rows, model_fingerprint
from tasks.label_filter import label_filter as label_filter_stage
from tasks.loss_selection import loss_selection as loss_selection_stage
from tasks.mechanism_audit import mechanism_audit as mechanism_audit_stage
from tasks.privacy_budget import check_charged, privacy_budget
from tasks.stage import RunContext
from tasks.target_gradient import target_gradient as target_gradient_stage
from tasks.target_space import target_space as target_space_stage

logger = logging.getLogger("gradmm_core.flow")


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
    matching: TargetGradientSettings
    space: StageArtifact | None
    data: DataReference
    target: StageArtifact


def release_target(runs: StageRuns, recipe: Recipe, drawn: tuple[int, int] | None = None) -> Aim:
    """The target, charged to the ledger and audited in a private run. The first that reads the data.

    Args:
        drawn: of so many random train rows alone, and the seed that draws them. Without privacy only: which rows
            are drawn depends on all of them.
    """
    context = runs.context
    model = model_fingerprint(recipe.model)
    wording = response_template(recipe)
    mechanism, matching = gaussian_mechanism(recipe.privacy), released_target(recipe)
    space = public_space(runs, recipe, model, wording, mechanism, matching)
    making = {
        "space": space,
        "model": model,
        "wording": wording,
        "settings": matching,
        "clipping_norm": recipe.privacy.clipping_norm,
        "mechanism": mechanism,
    }
    if mechanism and mechanism.safe:
        privacy_budget(context, making)
        runs.run(
            mechanism_audit_stage,
            mechanism=mechanism,
            probe_share=matching.probe_share,
            settings=recipe.mechanism_audit,
            seed=recipe.seed,
        )
    data = dataset_fingerprint(context)
    if drawn:
        assert mechanism is None
        data = data.model_copy(update={"train": drawn_rows(context, data.train, *drawn)})
    target = runs.run(target_gradient_stage, train=data.train, **making)
    if mechanism and mechanism.safe:
        check_charged(context, target)
    return Aim(model, wording, mechanism, matching, space, data, target)


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
                "clipping_norm": recipe.privacy.clipping_norm,
                "matching": aim.matching,
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
    probed = aim.matching.probe_share > 0 and recipe.generation.probe_weight > 0
    of_their_class = runs.run(
        label_filter_stage,
        texts=generated,
        model=model,
        wording=wording,
        settings=recipe.label_filter,
        target=target if probed else None,
        space=space if probed else None,
    )
    selected = runs.run(
        loss_selection_stage,
        texts=of_their_class,
        target=target,
        space=space,
        model=model,
        wording=wording,
        records={label: records(recipe, label, target) for label in context.labels},
        clipping_norm=recipe.privacy.clipping_norm,
        matching=aim.matching,
        loss=recipe.generation.loss,
        probe_weight=recipe.generation.probe_weight,
        settings=recipe.loss_selection,
    )
    return runs.run(category_balance_stage, texts=selected, settings=recipe.category_balance)


def public_space(
    runs: StageRuns,
    recipe: Recipe,
    model: ModelReference,
    wording: ResponseTemplate,
    mechanism: GaussianMechanism | None,
    settings: TargetGradientSettings,
) -> StageArtifact | None:
    """Where the target lives; None where nothing public decides it. Private runs are told what to expect of it."""
    privacy = recipe.privacy
    if not (settings.uses_public_text or mechanism):
        return None
    norms = ReleaseNorms.of(privacy.clipping_norm, settings.probe_share)
    space = runs.run(
        target_space_stage,
        model=model,
        wording=wording,
        instructions={c.label: c.instruction for c in recipe.classes},
        settings=settings,
        clipping_norm=norms.gradient,
    )
    if settings.probe_share < recipe.target_gradient.probe_share:
        logger.info("%s", TOO_NOISY_FOR_A_PROBE)
    if mechanism and privacy.declared_records:
        expected = expected_cosines(mechanism, norms, space.figures, privacy.declared_records)
        for line in preflight_lines(expected, recipe.class_names):
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
