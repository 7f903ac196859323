"""The privacy ledger: all private releases from one data set by the runs that share a root.

    <root>/ledger/<data set>.jsonl            one event per line; its .lock lies beside it
    <root>/ledger/<data set>/<number>.json    one event per object, if the root is in an object store

A release is two events: `intent`, on disk before any noise is drawn, and `released`, written once its artifact is
published. An intent is charged even if the process dies before it releases anything. The ledger can therefore
overcount, but never undercount.

An object store has no lock. An event is appended only if no other event was appended since the budget was
checked; otherwise the budget is checked again. Concurrent releases therefore stay within the budget together. Two
concurrent runs that release the same target may both be charged for it, if the budget has room for both, before
either has published. The later artifact then replaces the earlier one. The run whose artifact was replaced fails
when it reads it; when run again, it uses the other artifact.

Each line contains a digest of all lines up to and including itself. The digest reveals damage and careless edits.
It is not a signature, and it does not reveal that the last lines, or the whole file, were removed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from pydantic import Field

from gradmm.config.settings import Positive, Settings, TargetGradientSettings
from gradmm.errors import BudgetExhausted, InputError
from gradmm.privacy.ledger_store import LinesOfFile, LinesOfObjects, tries
from gradmm.privacy.mechanism import GaussianMechanism, zcdp_epsilon
from gradmm.storage.location import Location

#: Relative tolerance of the budget. Calibrating noise to an epsilon and computing the epsilon of that noise are
#: two numerical searches. Without a tolerance, a release might not fit a budget equal to its own epsilon.
RELATIVE_SLACK = 1e-9

Adjacency = Literal["add-or-remove", "replace"]


class Release(Settings):
    """The privacy cost of releasing one noisy sum, and the inputs of the sum."""

    recipe: str
    epsilon: Annotated[Positive, Field(description="The recipe's claim for this release alone.")]
    delta: Annotated[float, Field(gt=0, lt=1)]
    sigma: Annotated[Positive, Field(description="Standard deviation of the noise in each coordinate.")]
    clipping_norm: Annotated[
        Positive, Field(description="Upper bound on the norm of one record's vector, after any rounding.")
    ]
    adjacency: Adjacency
    noise: Literal["gaussian", "discrete-gaussian"] = "gaussian"
    space: Annotated[str, Field(description="The space of the released vector.")]
    stage_key: Annotated[str, Field(description="Digest of the target's data, settings, model and code.")]
    settings_key: Annotated[str, Field(description="The same digest without the data.")]


def release_of(
    recipe: str,
    mechanism: GaussianMechanism,
    settings: TargetGradientSettings,
    stage_key: str = "",
    settings_key: str = "",
) -> Release:
    """Describe the release of a recipe's target. The keys are empty until the settings or the data are known."""
    space = f"{settings.space}, centred" if settings.centred else settings.space
    return Release(
        recipe=recipe,
        epsilon=mechanism.epsilon,
        delta=mechanism.delta,
        sigma=mechanism.sigma,
        clipping_norm=mechanism.clipping_norm,
        adjacency=mechanism.adjacency,
        noise="discrete-gaussian" if mechanism.discrete else "gaussian",
        space=f"{space}, and a probe" if settings.probe_share > 0 else space,
        stage_key=stage_key,
        settings_key=settings_key,
    )


class Entry(Settings):
    """A release in the ledger. Without a sha256 it was begun but not finished; it is charged in either case."""

    release: Release
    id: str
    time: datetime
    sha256: str | None = None


def composed_epsilon(releases: Iterable[Release], delta: float, adjacency: Adjacency) -> float:
    """Compute epsilon at delta of all releases together, under adaptive composition.

    Gaussian mechanisms compose exactly, to one Gaussian mechanism (Dong, Roth and Su, 2022). For discrete Gaussian
    noise only its zero-concentrated DP is used (Canonne, Kamath and Steinke, 2020). If any release has discrete
    noise, all are composed by zCDP.
    """
    releases = list(releases)
    if not releases:
        return 0.0
    vectors_changed = 2.0 if adjacency == "replace" else 1.0
    precision = sum((vectors_changed * release.clipping_norm / release.sigma) ** 2 for release in releases)
    if all(release.noise == "gaussian" for release in releases):
        with np.errstate(divide="ignore"):  # the search starts at an epsilon whose delta underflows to 0
            return float(get_epsilon_gaussian(precision**-0.5, delta, tol=1e-15))
    return zcdp_epsilon(precision / 2, delta)


@dataclass(frozen=True)
class Ledger:
    """One data set's ledger. Safe for concurrent threads, processes and machines that share its folder.

    `file` is the folder of the event objects if the ledger is in an object store.
    """

    file: Location

    @classmethod
    def of(cls, root: Location, identity: str) -> Ledger:
        """Locate the ledger of the data set with this identity, under a readable name."""
        slug = re.sub(r"[^a-z0-9]+", "-", identity.lower()).strip("-")[:60]
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        name = f"{slug}-{digest}".lstrip("-")
        return cls(root / "ledger" / (f"{name}.jsonl" if isinstance(root, Path) else name))

    def lock(self) -> AbstractContextManager[None]:
        """Exclude other threads, processes and machines. Re-entrant. An object store has no lock: excludes nobody.

        Raises:
            InputError: if the lock is not available in time.
        """
        return self._lines.lock()

    def entries(self) -> list[Entry]:
        """Read all releases, oldest first.

        Raises:
            InputError: if the ledger is damaged or was edited.
        """
        return list(self._read()[0].values())

    def spent(self, delta: float, adjacency: Adjacency) -> float:
        """Compute the composed epsilon of all releases, finished or not."""
        return composed_epsilon((entry.release for entry in self.entries()), delta, adjacency)

    def check(self, release: Release, budget_epsilon: float, delta: float) -> None:
        """Check that the budget has room for one more release; write nothing.

        Raises:
            BudgetExhausted: if the composed epsilon would exceed the budget.
        """
        _check(self.entries(), release, budget_epsilon, delta)

    @contextmanager
    def charge(self, release: Release, budget_epsilon: float, delta: float) -> Iterator[Callable[[str], Entry]]:
        """Charge a release, then let the caller make it. Holds the lock, if there is one, throughout.

        Inside the block, the caller draws its noise, publishes its artifact, and calls the yielded function with
        the artifact's sha256. The release stays charged however the block ends.

        Raises:
            BudgetExhausted: if the release would exceed the budget; before any noise is drawn.
            InputError: if the release cannot be recorded; before any noise is drawn.
        """
        entry_id = secrets.token_hex(8)

        def intent(entries: Mapping[str, Entry]) -> dict[str, Any]:
            _check(entries.values(), release, budget_epsilon, delta)
            return {"id": entry_id, "release": release.model_dump(mode="json")}

        with self.lock():
            self._append("intent", intent)
            yield partial(self._finish, entry_id)

    def find(self, stage_key: str) -> Entry | None:
        """Return the newest finished release with this key; None if there is none."""
        finished = [e for e in self.entries() if e.release.stage_key == stage_key and e.sha256 is not None]
        return finished[-1] if finished else None

    def adopt(self, stage_key: str, sha256: str) -> Entry | None:
        """Return the release that an existing artifact was charged as; None if it was never charged.

        Finishes the release if the process died between publishing the artifact and recording it.
        """

        def finished(entries: Mapping[str, Entry]) -> dict[str, Any] | None:
            same = [entry for entry in entries.values() if entry.release.stage_key == stage_key]
            if not same or same[-1].sha256 is not None or any(entry.sha256 == sha256 for entry in same):
                return None
            return {"id": same[-1].id, "sha256": sha256}

        entries = self._append("released", finished).values()
        of_artifact = (e for e in entries if e.release.stage_key == stage_key and e.sha256 == sha256)
        return next(of_artifact, None)

    def _finish(self, entry_id: str, sha256: str) -> Entry:
        def finished(entries: Mapping[str, Entry]) -> dict[str, Any] | None:
            # Without a lock, another run may already have found the artifact and finished this release.
            return None if entries[entry_id].sha256 == sha256 else {"id": entry_id, "sha256": sha256}

        return self._append("released", finished)[entry_id]

    @property
    def _lines(self) -> LinesOfFile | LinesOfObjects:
        return LinesOfFile(self.file) if isinstance(self.file, Path) else LinesOfObjects(self.file)

    def _read(self) -> tuple[dict[str, Entry], int, str]:
        """Return the entries by id, the number of lines, and the last line's check."""
        lines = self._lines.read()
        entries: dict[str, Entry] = {}
        check = ""
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                del event["check"]
                expected, check = _line(event, check)
                if line != expected:
                    raise ValueError("the check does not match")
                _replay(entries, event)
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    f"line {number} or one before it is damaged, or was edited",
                    str(self.file),
                    "restore it from a backup; nothing was released",
                ) from error
        return entries, len(lines), check

    def _append(
        self, kind: str, event_fields: Callable[[Mapping[str, Entry]], dict[str, Any] | None]
    ) -> dict[str, Entry]:
        """Append an event that depends on the entries so far; return only once it is on disk.

        Args:
            event_fields: computes the event's fields from the entries, or None to append nothing; may raise. It is
                called again if another run appended an event in the meantime.

        Returns:
            The entries by id, including this event.
        """
        with self.lock():
            for _ in tries(self.file):
                entries, count, check = self._read()
                fields = event_fields(entries)
                if fields is None:
                    break
                event = {"event": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **fields}
                _replay(entries, event)
                if self._lines.append(_line(event, check)[0], after=count):
                    break
            return entries


def _check(entries: Iterable[Entry], release: Release, budget_epsilon: float, delta: float) -> None:
    """Raise BudgetExhausted if one more release would exceed the budget."""
    past = [entry.release for entry in entries]
    composed = composed_epsilon([*past, release], delta, release.adjacency)
    if not composed <= budget_epsilon * (1 + RELATIVE_SLACK):
        raise BudgetExhausted(
            f"this release would bring the composed epsilon to {composed:.3g} at delta {delta:.3g}, above the "
            f"budget of {budget_epsilon:g} ({len(past)} release{'' if len(past) == 1 else 's'} so far)",
            "privacy.budget_epsilon",
            "raise it, or keep the existing target",
        )


def _line(event: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Encode an event as its line, without a newline, and its check, which covers all lines up to this one."""
    check = hashlib.sha256((previous + json.dumps(event)).encode()).hexdigest()
    return json.dumps(event | {"check": check}).encode(), check


def _replay(entries: dict[str, Entry], event: dict[str, Any]) -> Entry:
    """Apply one event to the entries.

    Raises:
        ValueError: if the event cannot follow the earlier ones: one charge pays for one artifact.
    """
    entry = entries.get(event["id"])
    if event["event"] == "intent" and entry is None:
        entry = Entry(release=event["release"], id=event["id"], time=event["time"])
    elif event["event"] == "released" and entry is not None and entry.sha256 is None:
        entry = entry.model_copy(update={"sha256": event["sha256"]})
    else:
        raise ValueError(f"release {event['id']} was already finished, or never begun")
    entries[entry.id] = entry
    return entry
