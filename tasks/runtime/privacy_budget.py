"""The ledger's checks of a run, and the composed guarantee of all releases."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prefect import task

from gradmm.config.settings import PrivacySettings
from gradmm.privacy.guarantee import Guarantee, guarantee
from gradmm.privacy.ledger import Entry, Release
from gradmm.privacy.ledger import composed_guarantee as composed
from gradmm.privacy.release_plan import ReleasePlan
from gradmm.storage.artifacts import StageArtifact
from gradmm.storage.redaction import redact_errors
from gradmm.tasks.runtime.inputs import read_split
from gradmm.tasks.runtime.registry import STAGE_VERSIONS
from gradmm.tasks.runtime.releasing import ledger_of, proposed_budget, uncharged
from gradmm.tasks.runtime.stage_task import RunContext, SplitReference
from gradmm.tasks.target_gradient import planned_release


@task(name="privacy_budget", persist_result=False, result_serializer="json")
def privacy_budget(context: RunContext, public_inputs: dict[str, Any]) -> bool:
    """Refuse a run whose release would exceed the budget, before private data are read.

    If the ledger has a release with the same settings, only the data show whether it can be used again. The stage
    `target_gradient` then checks the budget itself, before it draws noise.

    Args:
        public_inputs: inputs of `target_gradient` except the data.

    Returns:
        Whether the run makes another release for certain.

    Raises:
        BudgetExhausted: if one more release would exceed the budget.
    """
    ledger, release = ledger_of(context), planned_release(context, **public_inputs)
    ledger.stated_releases(release.unit_column)  # a damaged ledger is found before it is needed
    released_before = any(entry.release.settings_key == release.settings_key for entry in ledger.all_entries())
    certain = not released_before or context.redraw
    if certain:
        ledger.check(proposed_budget(context), release)
    return certain


@task(name="releases_budget", persist_result=False, result_serializer="json")
def releases_budget(context: RunContext, planned: list[Release]) -> None:
    """Refuse a study whose releases together would exceed the budget, before anything is computed or charged.

    Which of them have been made already is known for certain only when their inputs are. Until then, a planned
    release is taken for made if the ledger has one of the same space and noise that has been published.

    Raises:
        BudgetExhausted: if the others would exceed the budget.
    """
    ledger = ledger_of(context)
    made = Counter(_kind(entry.release) for entry in ledger.all_entries() if _was_published(context, entry))
    new = []
    for release in planned:
        made[_kind(release)] -= 1
        if made[_kind(release)] < 0:
            new.append(release)
    if new:
        ledger.check(proposed_budget(context), *new)


def _was_published(context: RunContext, entry: Entry) -> bool:
    """Return whether a release's result exists, also where a kill kept its entry from being finished."""
    stages = (context.root.find_stage(stage, entry.release.stage_key) for stage in STAGE_VERSIONS)
    return entry.sha256 is not None or any(stages)


def _kind(release: Release) -> tuple[object, ...]:
    return release.space, release.sigma, release.clipping_norm, release.noise


@task(name="count_records", persist_result=False, result_serializer="json")
def count_records(context: RunContext, train: SplitReference, release: Release | None = None) -> None:
    """Let releases from records and units of `train` count in the run's ledger, whatever their data are called.

    Args:
        release: to be made from them. If it is refused, they are not counted: nothing was released of them.

    Raises:
        BudgetExhausted: if the release would exceed the budget of a ledger that counts some of these records.
    """
    data = redact_errors(lambda: read_split(context, train), "count_records", context.root.errors)
    planned = None if release is None else (proposed_budget(context), release)
    ledger_of(context).count_records(data.texts, data.unit_names, planned)


def check_charged(context: RunContext, target: StageArtifact) -> None:
    """Check that a ledger that counts these data has charged the release of a private target.

    Raises:
        InputError: if no release was charged, because the ledger was removed or bypassed.
    """
    ledger = ledger_of(context)
    if all(entry.sha256 != target.sha256 for entry in ledger.all_entries()):
        raise uncharged(ledger)


def composed_guarantee(settings: PrivacySettings, plan: ReleasePlan, context: RunContext) -> Guarantee:
    """Return the run's guarantee, with the composition of all releases under the root."""
    single = guarantee(settings, plan.mechanism)
    if not single.safe:
        return single
    return composed(single, ledger_of(context).stated_releases(settings.unit_column))
