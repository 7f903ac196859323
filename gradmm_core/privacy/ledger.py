"""The privacy ledger: all private releases from one data set by the runs that share a root.

    <root>/ledger/<data set>.jsonl            one event per line; its .lock lies beside it
    <root>/ledger/<data set>/<number>.json    one event per object, if the root is in an object store
    <root>/ledger/<data set>.rows             digests of the data's records and units, see `row_digests`

A ledger is named after its data, but data may have several names. Releases therefore count in every ledger whose
data share a record or a unit with the released data, and a release must be within the budgets of all of these.

The event `budget` states what the owner of the data allows: an epsilon, at a delta, under an adjacency. All later
runs are judged by it, whatever their own recipes say.

A release is two events: `intent`, on disk before any noise is drawn, and `released`, written once its artifact is
published. An intent is charged even if the process dies before it releases anything. The ledger can therefore
overcount, but never undercount.

An object store has no lock. An event is appended only if no other event was appended since the budget was
checked; otherwise the budget is checked again. Related ledgers are checked once more after the intent: of two runs
that were charged at once in two ledgers, beyond the budget together, at least one stops before it draws noise.
Concurrent releases therefore stay within the budget together. Two concurrent runs that release the same target may
both be charged for it, if the budget has room for both, before either has published. The later artifact then
replaces the earlier one. The run whose artifact was replaced fails when it reads it; when run again, it uses the
other artifact.

Each line contains a digest of all lines up to and including itself. The digest reveals damage and careless edits.
It is not a signature, and it does not reveal that the last lines, or the whole file, were removed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import UInt64
from pydantic import Field

from gradmm.config.settings import Positive, PrivacySettings, Settings, TargetGradientSettings
from gradmm.errors import BudgetExhausted, InputError
from gradmm.privacy.guarantee import Guarantee
from gradmm.privacy.ledger_store import LinesOfFile, LinesOfObjects, tries
from gradmm.privacy.mechanism import GaussianMechanism, epsilon_of
from gradmm.privacy.row_digests import NO_DIGESTS, RowDigests
from gradmm.storage.location import Location, objects_in

#: Relative tolerance of the budget. Calibrating noise to an epsilon and computing the epsilon of that noise are
#: two numerical searches. Without a tolerance, a release might not fit a budget equal to its own epsilon.
RELATIVE_SLACK = 1e-9

Adjacency = Literal["add-or-remove", "replace"]


class Budget(Settings):
    """The largest composed epsilon of all releases, at a delta, under an adjacency."""

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    adjacency: Adjacency


def budget_of(settings: PrivacySettings, mechanism: GaussianMechanism) -> Budget:
    """Return the budget that a recipe proposes: its own, or that of one release."""
    epsilon = settings.budget_epsilon or mechanism.epsilon
    return Budget(epsilon=epsilon, delta=mechanism.delta, adjacency=mechanism.adjacency)


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
    unit_column: Annotated[
        str | None, Field(description="Column that names the unit of privacy; None: each record is a unit.")
    ] = None
    noise: Literal["gaussian", "discrete-gaussian"] = "gaussian"
    space: Annotated[str, Field(description="The space of the released vector.")]
    stage_key: Annotated[str, Field(description="Digest of the target's data, settings, model and code.")]
    settings_key: Annotated[str, Field(description="The same digest without the data.")]


def release_of(
    recipe: str,
    mechanism: GaussianMechanism,
    settings: TargetGradientSettings,
    unit_column: str | None = None,
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
        clipping_norm=mechanism.record_norm,
        adjacency=mechanism.adjacency,
        unit_column=unit_column,
        noise="discrete-gaussian" if mechanism.discrete else "gaussian",
        space=", and ".join(
            [
                space,
                *(["class sums of a probe"] if settings.releases_class_sums_alone else []),
                *(["a probe"] if settings.probe_chooses_texts else []),
                *(["token rates"] if settings.token_share > 0 else []),
            ]
        ),
        stage_key=stage_key,
        settings_key=settings_key,
    )


class Entry(Settings):
    """A release in the ledger. Without a sha256 it was begun but not finished; it is charged in either case."""

    release: Release
    id: str
    time: datetime
    sha256: str | None = None


def _for_one_record(release: Release) -> Release:
    """Bound the change by one record. Adding a record to a unit replaces the unit's vector by another one."""
    if release.unit_column is None:
        return release
    return release.model_copy(update={"clipping_norm": 2 * release.clipping_norm})


def composed_epsilon(releases: Iterable[Release], delta: float, adjacency: Adjacency) -> float:
    """Compute epsilon at delta of all releases together, under adaptive composition.

    Gaussian mechanisms compose exactly, to one Gaussian mechanism (Dong, Roth and Su, 2022). For discrete Gaussian
    noise only its zero-concentrated DP is used (Canonne, Kamath and Steinke, 2020). If any release has discrete
    noise, all are composed by zCDP.
    """
    releases = list(releases)
    discrete = any(release.noise != "gaussian" for release in releases)
    return epsilon_of(composed_mu(releases, adjacency), delta, discrete)


def composed_mu(releases: Iterable[Release], adjacency: Adjacency) -> float:
    """Compute sensitivity / sigma of the one Gaussian mechanism that all releases compose to."""
    vectors_changed = 2.0 if adjacency == "replace" else 1.0
    return math.sqrt(sum((vectors_changed * release.clipping_norm / release.sigma) ** 2 for release in releases))


def composed_guarantee(single: Guarantee, releases: Sequence[Release]) -> Guarantee:
    """Add the composition of all `stated_releases` to the guarantee of one of them."""
    if not single.safe or single.delta is None:
        return single
    adjacency: Adjacency = "replace" if single.adjacency == "replace" else "add-or-remove"
    several_kinds = len({release.noise for release in releases}) > 1
    return single.model_copy(
        update={
            "releases": len(releases),
            "composed_epsilon": composed_epsilon(releases, single.delta, adjacency),
            "mu": None if several_kinds else composed_mu(releases, adjacency),
        }
    )


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

    @classmethod
    def all(cls, root: Location) -> list[Ledger]:
        """Return all ledgers of a root, by name."""
        return cls._within(root / "ledger")

    @classmethod
    def _within(cls, folder: Location) -> list[Ledger]:
        if isinstance(folder, Path):
            return [cls(file) for file in sorted(folder.glob("*.jsonl"))]
        names = [name.rpartition("/")[2] for name in objects_in(folder)]
        return [cls(folder / name) for name in names if "." not in name]

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(".jsonl")

    @property
    def rows(self) -> RowDigests:
        return RowDigests(self.file.parent)

    def digests(self, texts: Sequence[str], units: Iterable[str] = ()) -> UInt64[np.ndarray, " different"]:
        """Return what data are recognised by in the root's ledgers; nothing while none counts any."""
        return self.rows.of(texts, units) if self.rows.ledgers() else NO_DIGESTS

    def count_records(
        self, texts: Sequence[str], units: Iterable[str] = (), planned: tuple[Budget, Release] | None = None
    ) -> None:
        """Let releases from data with one of these texts, or one of these units' names, count in this ledger.

        Args:
            planned: the release to be made from them, and the budget as for `check`. If it is refused, nothing is
                counted.

        Raises:
            BudgetExhausted: as `check`, for the planned release.
        """
        digests = self.rows.of(texts, units)
        if planned is not None:
            self.check(*planned, uncounted=digests)
        with self._lines.lock():
            self.rows.add(self.name, digests)

    def related(self, uncounted: UInt64[np.ndarray, " different"] = NO_DIGESTS) -> list[Ledger]:
        """Return this ledger and all others of the root whose data share a record or a unit with it, by name.

        Args:
            uncounted: `digests` of data that are taken for counted in this ledger.
        """
        suffix = self.file.name.removeprefix(self.name)
        others = [Ledger(self.file.parent / f"{name}{suffix}") for name in self.rows.related(self.name, uncounted)]
        return sorted([self, *others], key=lambda ledger: ledger.name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude all who release from data that share a record with these: threads, processes and machines.

        Re-entrant. An object store has no lock: excludes nobody.

        Raises:
            InputError: if a lock is not available in time.
        """
        if self._lines.locked:
            # Ledgers that became related since wait for this one's lock, and may hold theirs.
            yield
            return
        with ExitStack() as locks:
            for ledger in self.related():  # by name: all take the locks in one order
                locks.enter_context(ledger._lines.lock())
            yield

    def entries(self) -> list[Entry]:
        """Read all releases, oldest first.

        Raises:
            InputError: if the ledger is damaged or was edited.
        """
        return list(self._read().entries.values())

    def all_entries(self) -> list[Entry]:
        """Read all releases from data that share a record or a unit with these, those of this ledger included."""
        return [entry for ledger in self.related() for entry in ledger.entries()]

    def stated_releases(self, unit_column: str | None) -> list[Release]:
        """Read all releases under the root that a published guarantee composes, whichever data they are from.

        Which ledgers share a record with these data depends on single records: a published number of related
        releases would tell who is in both data sets. Guarantees for one record compose with those for units, whose
        vectors one record may turn round: they have twice the norm here. Guarantees for a unit compose with others
        for the same unit only; related data cannot have been released under another one.

        Args:
            unit_column: of the guarantee, as in `Release`.

        Raises:
            InputError: if a ledger is damaged or was edited.
        """
        releases = [entry.release for ledger in self._within(self.file.parent) for entry in ledger.entries()]
        if unit_column is None:
            return [_for_one_record(each) for each in releases]
        return [each for each in releases if each.unit_column == unit_column]

    def spent(self, delta: float, adjacency: Adjacency) -> float:
        """Compute the composed epsilon of `all_entries`, finished or not."""
        return composed_epsilon((entry.release for entry in self.all_entries()), delta, adjacency)

    def budget(self) -> Budget | None:
        """Read the budget that the data's owner has set; None if there is none yet."""
        return self._read().budget

    def set_budget(self, budget: Budget, unless_set: bool = False) -> Budget:
        """Set the budget by which all later releases are judged; return the one that holds.

        Args:
            unless_set: keep a budget that was set before.
        """

        def changed(state: _State) -> dict[str, Any] | None:
            keep = state.budget == budget or (unless_set and state.budget is not None)
            return None if keep else {"budget": budget.model_dump(mode="json")}

        held = self._append("budget", changed).budget
        assert held is not None
        return held

    def check(
        self, budget: Budget, *releases: Release, uncounted: UInt64[np.ndarray, " different"] = NO_DIGESTS
    ) -> None:
        """Check that the budget has room for all of these releases; write nothing.

        Args:
            budget: judges where the ledger has none of its own.
            uncounted: `digests` of the data to release from, if they may not be counted in this ledger yet.

        Raises:
            BudgetExhausted: if the composed epsilon would exceed the budget of this ledger or of a related one.
        """
        self._check(self._read(), budget, releases, uncounted)

    def _check(
        self,
        own: _State,
        budget: Budget,
        releases: Sequence[Release],
        uncounted: UInt64[np.ndarray, " different"] = NO_DIGESTS,
    ) -> None:
        related = {ledger.name: ledger._read() for ledger in self.related(uncounted) if ledger.name != self.name}
        past = [entry.release for state in (own, *related.values()) for entry in state.entries.values()]
        for release in releases:
            _check_unit(past, release, self.file)
        _check_budget(own.budget or budget, past, releases, "")
        for name, state in related.items():
            if state.budget is not None:
                _check_budget(
                    state.budget, past, releases, f" of {name}, which counts some of these records or units"
                )

    @contextmanager
    def charge(self, release: Release, budget: Budget) -> Iterator[Callable[[str], Entry]]:
        """Charge a release, then let the caller make it. Holds the lock, if there is one, throughout.

        Inside the block, the caller draws its noise, publishes its artifact, and calls the yielded function with
        the artifact's sha256. The release stays charged however the block ends.

        Raises:
            BudgetExhausted: if the release would exceed the budget; before any noise is drawn.
            InputError: if the release cannot be recorded; before any noise is drawn.
        """
        entry_id = secrets.token_hex(8)

        def intent(state: _State) -> dict[str, Any]:
            self._check(state, budget, [release])
            return {"id": entry_id, "release": release.model_dump(mode="json")}

        with self.lock():
            charged = self._append("intent", intent)
            if not isinstance(self.file, Path):
                del charged.entries[entry_id]
                self._check(charged, budget, [release])  # no lock kept related ledgers as they were
            yield partial(self._finish, entry_id)

    def find(self, stage_key: str) -> Entry | None:
        """Return the newest finished release with this key; None if there is none."""
        finished = [e for e in self.entries() if e.release.stage_key == stage_key and e.sha256 is not None]
        return finished[-1] if finished else None

    def adopt(self, stage_key: str, sha256: str) -> Entry | None:
        """Return the release that an existing artifact was charged as; None if it was never charged.

        Finishes the release if the process died between publishing the artifact and recording it.
        """

        def finished(state: _State) -> dict[str, Any] | None:
            same = [entry for entry in state.entries.values() if entry.release.stage_key == stage_key]
            if not same or same[-1].sha256 is not None or any(entry.sha256 == sha256 for entry in same):
                return None
            return {"id": same[-1].id, "sha256": sha256}

        entries = self._append("released", finished).entries.values()
        of_artifact = (e for e in entries if e.release.stage_key == stage_key and e.sha256 == sha256)
        return next(of_artifact, None)

    def _finish(self, entry_id: str, sha256: str) -> Entry:
        def finished(state: _State) -> dict[str, Any] | None:
            # Without a lock, another run may already have found the artifact and finished this release.
            return None if state.entries[entry_id].sha256 == sha256 else {"id": entry_id, "sha256": sha256}

        return self._append("released", finished).entries[entry_id]

    @property
    def _lines(self) -> LinesOfFile | LinesOfObjects:
        return LinesOfFile(self.file) if isinstance(self.file, Path) else LinesOfObjects(self.file)

    def _read(self) -> _State:
        state = _State()
        for number, line in enumerate(self._lines.read(), 1):
            try:
                event = json.loads(line)
                del event["check"]
                expected, check = _line(event, state.check)
                if line != expected:
                    raise ValueError("the check does not match")
                state.replay(event, check)
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    f"line {number} or one before it is damaged, or was edited",
                    str(self.file),
                    "restore it from a backup; nothing was released",
                ) from error
        return state

    def _append(self, kind: str, event_fields: Callable[[_State], dict[str, Any] | None]) -> _State:
        """Append an event that depends on the events so far; return only once it is on disk.

        Args:
            event_fields: computes the event's fields, or None to append nothing; may raise. It is called again if
                another run appended an event in the meantime.

        Returns:
            The ledger's state, including this event.
        """
        with self._lines.lock():
            for _ in tries(self.file):
                state = self._read()
                fields = event_fields(state)
                if fields is None:
                    break
                event = {"event": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **fields}
                line, check = _line(event, state.check)
                count = state.lines
                state.replay(event, check)
                if self._lines.append(line, after=count):
                    break
            return state


def _check_unit(past: Sequence[Release], release: Release, file: Location) -> None:
    """Raise an InputError if the unit of privacy is another one: guarantees for several units do not compose."""
    others = {each.unit_column for each in past} - {release.unit_column}
    if others:
        before = others.pop()
        counted = "each record is a unit" if before is None else f"units are named by the column {before!r}"
        raise InputError(
            f"in the releases so far, {counted}: guarantees for different units do not compose",
            f"privacy.unit_column, with {file}",
            f"set privacy.unit_column={'null' if before is None else before}",
        )


def _check_budget(budget: Budget, past: Sequence[Release], releases: Sequence[Release], whose: str) -> None:
    """Raise BudgetExhausted if more releases would exceed the budget."""
    composed = composed_epsilon([*past, *releases], budget.delta, budget.adjacency)
    if not composed <= budget.epsilon * (1 + RELATIVE_SLACK):
        count = f"{len(past)} release{'' if len(past) == 1 else 's'} so far"
        these = "this release" if len(releases) == 1 else f"these {len(releases)} releases"
        raise BudgetExhausted(
            f"{these} would bring the composed epsilon to {composed:.3g} at delta {budget.delta:.3g} "
            f"({budget.adjacency}), above the budget of {budget.epsilon:g}{whose} ({count})",
            "privacy.budget_epsilon",
            "keep the existing target; the data's owner can raise the budget",
        )


def _line(event: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Encode an event as its line, without a newline, and its check, which covers all lines up to this one."""
    check = hashlib.sha256((previous + json.dumps(event)).encode()).hexdigest()
    return json.dumps(event | {"check": check}).encode(), check


@dataclass
class _State:
    """All that a ledger's events say.

    Attributes:
        entries: the releases by id, oldest first.
        lines: the number of events.
        check: the last line's check.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    budget: Budget | None = None
    lines: int = 0
    check: str = ""

    def replay(self, event: dict[str, Any], check: str) -> None:
        """Apply one event.

        Raises:
            ValueError: if the event cannot follow the earlier ones: one charge pays for one artifact.
        """
        entry = self.entries.get(event.get("id", ""))
        if event["event"] == "budget":
            self.budget = Budget.model_validate(event["budget"])
        elif event["event"] == "intent" and entry is None:
            self.entries[event["id"]] = Entry(release=event["release"], id=event["id"], time=event["time"])
        elif event["event"] == "released" and entry is not None and entry.sha256 is None:
            self.entries[event["id"]] = entry.model_copy(update={"sha256": event["sha256"]})
        else:
            raise ValueError(f"release {event.get('id')} was already finished, or never begun")
        self.lines += 1
        self.check = check
