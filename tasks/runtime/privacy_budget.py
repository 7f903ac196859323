"""The ledger's checks of a run, and the composed guarantee of all releases."""

from __future__ import annotations

from typing import Any

from prefect import task

from gradmm.config.settings import PrivacySettings
from gradmm.errors import InputError
from gradmm.privacy.guarantee import Guarantee, guarantee
from gradmm.privacy.release_plan import ReleasePlan
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import RunContext
from gradmm.tasks.target_gradient import STAGE, ledger_of, planned_release


@task(name="privacy_budget", persist_result=False, result_serializer="json")
def privacy_budget(context: RunContext, public_inputs: dict[str, Any]) -> None:
    """Refuse a run whose release would exceed the budget, before private data are read.

    If the ledger has a release with the same settings, only the data show whether it can be used again. The stage
    `target_gradient` then checks the budget itself, before it draws noise.

    Args:
        public_inputs: inputs of `target_gradient` except the data.

    Raises:
        BudgetExhausted: if one more release would exceed the budget.
    """
    ledger, release = ledger_of(context), planned_release(context, **public_inputs)
    released_before = any(entry.release.settings_key == release.settings_key for entry in ledger.entries())
    if not released_before or STAGE in context.force:
        assert context.budget_epsilon is not None  # set in every private run
        ledger.check(release, context.budget_epsilon, release.delta)


def check_charged(context: RunContext, target: StageArtifact) -> None:
    """Check that the ledger has charged the release of a private target.

    Raises:
        InputError: if no release was charged, because the ledger was removed or bypassed.
    """
    ledger = ledger_of(context)
    if all(entry.sha256 != target.sha256 for entry in ledger.entries()):
        raise InputError(
            "no charged release matches the private target",
            str(ledger.file),
            "restore the ledger from a backup, or draw a new target by forcing target_gradient",
        )


def composed_guarantee(settings: PrivacySettings, plan: ReleasePlan, context: RunContext) -> Guarantee:
    """Return the run's guarantee, with the composition of all releases from the same data in the ledger."""
    single = guarantee(settings, plan.mechanism)
    if not single.safe or single.delta is None:
        return single
    ledger = ledger_of(context)
    return single.model_copy(
        update={
            "releases": len(ledger.entries()),
            "composed_epsilon": ledger.spent(single.delta, settings.adjacency),
        }
    )
