"""Stage 1: the gradient that the synthetic texts are to match, with noise if the run is private."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradmm_core.artifacts import StageArtifact
from gradmm_core.ledger import Ledger, Release, release_of
from gradmm_core.model_reference import ModelReference
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.wording import ResponseTemplate
from tasks.inputs import read_model, read_split
from tasks.stage import Publication, RunContext, SplitReference, stage_key, stage_task

if TYPE_CHECKING:
    from gradmm_core.target_gradient import TargetSums
    from gradmm_core.target_space import TargetSpace

STAGE = "target_gradient"


@stage_task(STAGE)
def target_gradient(
    context: RunContext,
    train: SplitReference,
    space: StageArtifact | None,
    model: ModelReference,
    wording: ResponseTemplate,
    settings: TargetGradientSettings,
    clipping_norm: float,
    mechanism: GaussianMechanism | None,
    publication: Publication,
) -> StageArtifact:
    """Sums the clipped per-example gradients of each class and adds the mechanism's noise, once.

    A private target is charged to the ledger before its noise is drawn. One that is there already is taken,
    whether or not Prefect remembers it: drawing again would be another release.
    """
    # Late, see tasks/stage.py.
    from gradmm_core.target_gradient import target_sums
    from gradmm_core.target_space import from_table
    from gradmm_core.unfinished_sums import UnfinishedSums

    unfinished = UnfinishedSums(publication.unfinished)
    ledger = ledger_of(context) if mechanism and mechanism.safe else None
    if ledger and (made := _already_released(ledger, context, publication)):
        unfinished.delete()  # of the run that released it, if it was killed right after
        return made
    release = None
    if ledger and mechanism:
        inputs = {"space": space, "model": model, "wording": wording, "settings": settings}
        release = planned_release(
            context, **inputs, clipping_norm=clipping_norm, mechanism=mechanism, key=publication.key
        )
        ledger.check(release, _budget(context), release.delta)  # before minutes of work, and again below
    attention = None if settings.matching == "head" else "eager"
    language_model, template = read_model(context, model, wording, attention)
    data = read_split(context, train)
    where = from_table(space and space.read_table(), template, settings, language_model.device)
    sums = target_sums(language_model, template, data, settings, clipping_norm, mechanism, where, unfinished)
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
    """Charged before the noise is drawn."""
    with ledger.lock():
        if made := _already_released(ledger, context, publication):  # by another run that was faster
            return made
        with ledger.charge(release, _budget(context), release.delta) as finish:
            made = _publish(sums, where, mechanism, publication)
            finish(made.sha256)
    return made


def _budget(context: RunContext) -> float:
    assert context.budget_epsilon is not None  # the flow sets it for a private run
    return context.budget_epsilon


def ledger_of(context: RunContext) -> Ledger:
    """Where releases from this run's data are counted."""
    return Ledger.of(context.root.path, context.ledger)


def planned_release(
    context: RunContext,
    space: StageArtifact | None,
    model: ModelReference,
    wording: ResponseTemplate,
    settings: TargetGradientSettings,
    clipping_norm: float,
    mechanism: GaussianMechanism,
    key: str = "",
) -> Release:
    """What a private target costs. It is known before any data are: `key` is the stage's, once they are read."""
    inputs: dict[str, Any] = {
        "space": space,
        "model": model,
        "wording": wording,
        "settings": settings,
        "clipping_norm": clipping_norm,
        "mechanism": mechanism,
    }
    return release_of(context.recipe, mechanism, settings, key, settings_key=stage_key(STAGE, inputs))


def _already_released(ledger: Ledger, context: RunContext, publication: Publication) -> StageArtifact | None:
    if STAGE in context.force:
        return None
    with ledger.lock():
        made = publication.found()
        return made if made and ledger.adopt(publication.key, made.sha256) else None


def _publish(
    sums: TargetSums, where: TargetSpace, mechanism: GaussianMechanism | None, publication: Publication
) -> StageArtifact:
    from gradmm_core.probe import fit_probe
    from gradmm_core.target_table import to_table

    values, moments = sums.release(mechanism)
    figures = {
        "records": {str(label): count for label, count in sums.records.items()},
        "text_tokens": {str(label): tokens for label, tokens in sums.text_tokens.items()},
        "clip_fraction": sums.clip_fraction,
        "sigma": mechanism.sigma if mechanism else None,
        "cosine": {str(label): cosine for label, cosine in sums.cosines(values).items()},
    }
    if moments is not None:
        assert where.features is not None
        figures |= {
            "class_sum_noise": moments.class_sum_noise,
            "second_moment_noise": moments.second_moment_noise,
            "probe_trust": fit_probe(where.features, moments).trust,
        }
    return publication.publish(to_table(values, moments), figures)
