"""Release the target gradient: the clipped sums over the records, with noise in a private run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradmm.config.settings import TargetGradientSettings
from gradmm.errors import InputError
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.ledger import Budget, Ledger, Release, release_of
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.stage_task import Publication, RunContext, SplitReference, stage_key, stage_task

if TYPE_CHECKING:
    from gradmm.target.target_gradient import TargetSums
    from gradmm.target.target_space import TargetSpace

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
    from gradmm.target.target_gradient import target_sums
    from gradmm.target.target_space import from_table

    unfinished = UnfinishedSums(publication.unfinished)
    ledger = ledger_of(context) if mechanism and mechanism.safe else None
    if ledger and not context.redraw and (made := _already_released(ledger, publication)):
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
        ledger.check(release, proposed_budget(context))  # fail early; `charge` checks again
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
    if ledger and release:
        made = _release(sums, where, mechanism, ledger, release, context, publication)
    else:
        made = _publish(sums, where, mechanism, publication)
    unfinished.delete()
    return made


def _release(
    sums: TargetSums,
    where: TargetSpace,
    mechanism: GaussianMechanism | None,
    ledger: Ledger,
    release: Release,
    context: RunContext,
    publication: Publication,
) -> StageArtifact:
    """Charge the release, then add noise and publish."""
    with ledger.lock():
        if not context.redraw and (made := _already_released(ledger, publication)):  # by a concurrent run
            return made
        budget = ledger.set_budget(proposed_budget(context), unless_set=True)
        with ledger.charge(release, budget) as finish:
            made = _publish(sums, where, mechanism, publication)
            finish(made.sha256)
    return made


def proposed_budget(context: RunContext) -> Budget:
    """Return the budget of a private run, which holds unless the ledger has one."""
    assert context.budget is not None  # the flow sets it for a private run
    return context.budget


def ledger_of(context: RunContext) -> Ledger:
    """Return the ledger that counts the releases from this run's data."""
    return Ledger.of(context.root.path, context.ledger)


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


def _already_released(ledger: Ledger, publication: Publication) -> StageArtifact | None:
    """Return the target of these inputs if it was charged, to this ledger or under another name of the data.

    Raises:
        InputError: if there is a target, but no ledger knows of its release.
    """
    with ledger.lock():
        made = publication.found()
        if made is None:
            return None
        related = ledger.related()
        if any(each.adopt(publication.key, made.sha256) for each in related):
            return made
        if all(entry.release.stage_key != publication.key for each in related for entry in each.entries()):
            raise uncharged(ledger)
        return None


def uncharged(ledger: Ledger) -> InputError:
    """Return the error of a private target whose release no ledger has charged."""
    return InputError(
        "no charged release matches the private target", str(ledger.file), "restore the ledger from a backup"
    )


def _publish(
    sums: TargetSums, where: TargetSpace, mechanism: GaussianMechanism | None, publication: Publication
) -> StageArtifact:
    from gradmm.target.target_gradient import released_target

    return publication.publish(*released_target(sums, where, mechanism))
