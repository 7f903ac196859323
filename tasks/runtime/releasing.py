"""Releases of private sums: found again where they were made before, otherwise charged to the ledger and drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gradmm.errors import InputError
from gradmm.privacy.ledger import Budget, Ledger, Release
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import Publication, RunContext

Sums = TypeVar("Sums")


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
    redraw: bool = False,
) -> StageArtifact:
    """Charge a release, then draw its noise and publish it, unless a concurrent run has made it meanwhile.

    Args:
        redraw: make another release even so.
        publish: draws the noise and writes the stage's Parquet.
    """
    with ledger.lock():
        if not redraw and (made := already_released(ledger, publication)):
            return made
        budget = ledger.set_budget(proposed_budget(context), unless_set=True)
        with ledger.charge(release, budget) as finish:
            made = publish()
            finish(made.sha256)
    return made


def released_once(
    context: RunContext,
    mechanism: GaussianMechanism,
    release: Release,
    publication: Publication,
    private_sums: Callable[[], Sums],
    publish: Callable[[Sums], StageArtifact],
) -> StageArtifact:
    """Find a release again, or compute private sums, charge them, and publish them with noise.

    A release that the budget refuses is refused before anything is computed. A mechanism that is not safe, which
    promises nothing, is not charged.

    Args:
        private_sums: reads the records.
        publish: draws the noise and writes the stage's Parquet.
    """
    if not mechanism.safe:
        return publish(private_sums())
    ledger = ledger_of(context)
    if made := already_released(ledger, publication):
        return made
    ledger.check(proposed_budget(context), release)  # fail early; charging checks again
    sums = private_sums()
    return charged_release(context, ledger, release, publication, lambda: publish(sums))


def uncharged(ledger: Ledger) -> InputError:
    """Return the error of a private result whose release no ledger has charged."""
    return InputError(
        "no charged release matches the private target", str(ledger.file), "restore the ledger from a backup"
    )
