"""Releases of private sums: found again where they were made before, otherwise charged to the ledger and drawn."""

from __future__ import annotations

from collections.abc import Callable

from gradmm.errors import InputError
from gradmm.privacy.ledger import Budget, Ledger, Release
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import Publication, RunContext


def ledger_of(context: RunContext) -> Ledger:
    """Return the ledger that counts the releases from this run's data."""
    return Ledger.of(context.root.path, context.ledger)


def proposed_budget(context: RunContext) -> Budget:
    """Return the budget of a private run, which holds unless the ledger has one."""
    assert context.budget is not None  # the flow sets it for a private run
    return context.budget


def already_released(ledger: Ledger, publication: Publication) -> StageArtifact | None:
    """Return the result of these inputs if it was charged, to this ledger or under another name of the data.

    Raises:
        InputError: if there is a result, but no ledger knows of its release.
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


def charged_release(
    context: RunContext,
    ledger: Ledger,
    release: Release,
    publication: Publication,
    publish: Callable[[], StageArtifact],
) -> StageArtifact:
    """Charge a release, then draw its noise and publish it, unless a concurrent run has made it meanwhile.

    Args:
        publish: draws the noise and writes the stage's Parquet.
    """
    with ledger.lock():
        if not context.redraw and (made := already_released(ledger, publication)):
            return made
        budget = ledger.set_budget(proposed_budget(context), unless_set=True)
        with ledger.charge(release, budget) as finish:
            made = publish()
            finish(made.sha256)
    return made


def uncharged(ledger: Ledger) -> InputError:
    """Return the error of a private result whose release no ledger has charged."""
    return InputError(
        "no charged release matches the private target", str(ledger.file), "restore the ledger from a backup"
    )
