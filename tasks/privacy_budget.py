"""The ledger's part in a run: may it release a target, and what do all releases come to?"""

from __future__ import annotations

from typing import Any

from prefect import task

from gradmm_core.artifacts import StageArtifact
from gradmm_core.errors import InputError
from gradmm_core.privacy import Guarantee, guarantee
from gradmm_core.settings import PrivacySettings
from tasks.stage import RunContext
from tasks.target_gradient import STAGE, ledger_of, planned_release


@task(name="privacy_budget", persist_result=False, result_serializer="json")
def privacy_budget(context: RunContext, making: dict[str, Any]) -> None:
    """Refuses a run that could only pass the budget, before any private data are read.

    Where a target has been released with the same settings, the data have to be read to know whether it is still
    theirs; if it is not, the stage itself is refused, before its noise is drawn.

    Raises:
        InputError: if one more release would pass the budget.
    """
    ledger, release = ledger_of(context), planned_release(context, **making)
    same = [entry for entry in ledger.entries() if entry.release.settings_key == release.settings_key]
    if not same or STAGE in context.force:
        assert context.budget_epsilon is not None  # the flow sets it for a private run
        ledger.check(release, context.budget_epsilon, release.delta)


def check_charged(context: RunContext, target: StageArtifact) -> None:
    """Nothing is made from a private target that the ledger does not know.

    Raises:
        InputError: if no release was charged for it: the ledger was taken away, or passed by.
    """
    ledger = ledger_of(context)
    if all(entry.sha256 != target.sha256 for entry in ledger.entries()):
        raise InputError(
            "it has no release that was charged for the private target that is there",
            str(ledger.file),
            "restore the ledger from a backup, or draw another target with --force target_gradient",
        )


def composed_guarantee(settings: PrivacySettings, context: RunContext) -> Guarantee:
    """The run's guarantee, with all releases from the same data that the ledger knows of."""
    alone = guarantee(settings)
    if not alone.safe or alone.delta is None:
        return alone
    ledger = ledger_of(context)
    return alone.model_copy(
        update={
            "releases": len(ledger.entries()),
            "composed_epsilon": ledger.spent(alone.delta, settings.adjacency),
        }
    )
