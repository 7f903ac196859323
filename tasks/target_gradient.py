"""Release the target gradient: the clipped sums over the records, with noise in a private run."""

from __future__ import annotations

from typing import Any

from gradmm.config.settings import TargetGradientSettings
from gradmm.errors import InputError
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.ledger import Release, release_of
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.releasing import already_released, charged_release, ledger_of, proposed_budget
from gradmm.tasks.runtime.stage_task import Publication, RunContext, SplitReference, stage_key, stage_task

STAGE = "target_gradient"


@stage_task(STAGE)
def target_gradient(
    context: RunContext,
    train: SplitReference,
    space: StageArtifact | None,
    model: ModelReference,
    prompt_template: PromptTemplate,
    settings: TargetGradientSettings,
    clipping_norm: float,
    mechanism: GaussianMechanism | None,
    publication: Publication,
    rows_per_unit: int | None = None,
) -> StageArtifact:
    """Sum each class's clipped per-example gradients, and add the mechanism's noise once.

    A private target is charged to the ledger before its noise is drawn. An existing target is reused even if
    Prefect has no record of it, because drawing new noise would be another release.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.target.checkpoint import UnfinishedSums
    from gradmm.target.target_gradient import released_target, target_sums
    from gradmm.target.target_space import from_table

    unfinished = UnfinishedSums(publication.unfinished)
    ledger = ledger_of(context) if mechanism and mechanism.safe else None
    if ledger and not context.redraw and (made := already_released(ledger, publication)):
        if STAGE in context.force:
            raise InputError(
                "this target was released and charged before, and drawing it again would be another release",
                f"force {STAGE}",
                "do not force it, or set privacy.redraw=true",
            )
        unfinished.delete()  # left over if the releasing run was killed right after
        return made
    release = None
    if ledger and mechanism:
        release = planned_release(
            context,
            space=space,
            model=model,
            prompt_template=prompt_template,
            settings=settings,
            clipping_norm=clipping_norm,
            mechanism=mechanism,
            rows_per_unit=rows_per_unit,
            key=publication.key,
        )
        ledger.check(proposed_budget(context), release)  # fail early; `charge` checks again
    attention = None if settings.matching == "head" else "eager"
    language_model, template = read_model(context, model, prompt_template, attention)
    data = read_split(context, train)
    where = from_table(space and space.read_table(), template, settings, language_model.device)
    sums = target_sums(
        language_model,
        template,
        data,
        settings,
        clipping_norm,
        mechanism,
        where,
        unfinished,
        rows_per_unit,
    )

    def publish() -> StageArtifact:
        return publication.publish(*released_target(sums, where, mechanism))

    if ledger and release:
        made = charged_release(context, ledger, release, publication, publish, context.redraw)
    else:
        made = publish()
    unfinished.delete()
    return made


def planned_release(
    context: RunContext,
    space: StageArtifact | None,
    model: ModelReference,
    prompt_template: PromptTemplate,
    settings: TargetGradientSettings,
    clipping_norm: float,
    mechanism: GaussianMechanism,
    rows_per_unit: int | None = None,
    key: str = "",
) -> Release:
    """Describe the release of a private target. `key` is the stage's key, which depends on the data."""
    inputs: dict[str, Any] = {
        "space": space,
        "model": model,
        "prompt_template": prompt_template,
        "settings": settings,
        "clipping_norm": clipping_norm,
        "mechanism": mechanism,
    }
    if rows_per_unit is not None:
        inputs["rows_per_unit"] = rows_per_unit
    return release_of(
        context.recipe, mechanism, settings, context.unit_column, key, settings_key=stage_key(STAGE, inputs)
    )
