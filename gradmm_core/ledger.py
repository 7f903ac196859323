"""The privacy ledger: every private release made from one data set, whoever made it and wherever.

    <root>/ledger/<data set>.jsonl            one event per line; beside it its .lock
    <root>/ledger/<data set>/<number>.json    one event per object, where the root is in an object store

A release is two events: `intent`, on disk before any noise is drawn, and `released`, once its artifact is
published. What dies in between has been charged: the ledger can count too much, never too little.

In an object store there is no lock. An event is added only if none was added since the budget was checked, or
else it is checked again, so what two runs release together stays within the budget all the same. But two runs
that want the same target at once may both be charged for it, where the budget has room for both, before either
has published. The later artifact then takes the earlier one's place, both of them charged; the run whose artifact
is gone is told so when it reads it, and run again takes the other.

Each line carries a digest of all lines down to it. That finds damage and careless edits; it is no signature, and
it cannot tell that the last lines, or the whole file, were taken away.
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

from gradmm_core.errors import BudgetExhausted, InputError
from gradmm_core.ledger_lines import LinesOfFile, LinesOfObjects, tries
from gradmm_core.location import Location
from gradmm_core.privacy import GaussianMechanism, zcdp_epsilon
from gradmm_core.settings import Positive, Settings, TargetGradientSettings

#: Calibrating the noise to an epsilon and computing the epsilon of that noise are two numerical searches, which
#: agree to about this much: without it a release might not fit a budget equal to its own epsilon.
RELATIVE_SLACK = 1e-9

Adjacency = Literal["add-or-remove", "replace"]


class Release(Settings):
    """What one release of a noisy sum costs, and what it was made of."""

    recipe: str
    epsilon: Annotated[Positive, Field(description="What the recipe claims for this release alone.")]
    delta: Annotated[float, Field(gt=0, lt=1)]
    sigma: Annotated[Positive, Field(description="Standard deviation of the noise in each coordinate.")]
    clipping_norm: Annotated[
        Positive, Field(description="Largest norm of one record's vector, after any rounding.")
    ]
    adjacency: Adjacency
    noise: Literal["gaussian", "discrete-gaussian"] = "gaussian"
    space: Annotated[str, Field(description="What the vectors are.")]
    stage_key: Annotated[str, Field(description="Of the target gradient: data, settings, model and code.")]
    settings_key: Annotated[str, Field(description="The same without the data's digest.")]


def release_of(
    recipe: str,
    mechanism: GaussianMechanism,
    settings: TargetGradientSettings,
    stage_key: str = "",
    settings_key: str = "",
) -> Release:
    """What releasing a recipe's target costs; the keys are unknown before data, or settings, are."""
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
    """A release in the ledger. Without a sha256 it was begun and never finished, and counts all the same."""

    release: Release
    id: str
    time: datetime
    sha256: str | None = None


def composed_epsilon(releases: Iterable[Release], delta: float, adjacency: Adjacency) -> float:
    """Epsilon at delta of all releases together, each of which may have been chosen in sight of those before.

    Gaussian noise composes exactly, to one Gaussian (Dong, Roth and Su, 2022). Discrete Gaussian noise is known by
    its zero-concentrated privacy only (Canonne, Kamath and Steinke, 2020), which is then used for all.
    """
    releases = list(releases)
    if not releases:
        return 0.0
    moved = 2.0 if adjacency == "replace" else 1.0
    precision = sum((moved * release.clipping_norm / release.sigma) ** 2 for release in releases)
    if all(release.noise == "gaussian" for release in releases):
        with np.errstate(divide="ignore"):  # its search starts where delta is so near 0 that its logarithm is -inf
            return float(get_epsilon_gaussian(precision**-0.5, delta, tol=1e-15))
    return zcdp_epsilon(precision / 2, delta)


@dataclass(frozen=True)
class Ledger:
    """One data set's ledger. Safe for threads, processes and machines that share its folder.

    `file` is the folder of its objects where they are in an object store.
    """

    file: Location

    @classmethod
    def of(cls, root: Location, identity: str) -> Ledger:
        """The ledger of the data set with this identity, under a name that a person can tell."""
        slug = re.sub(r"[^a-z0-9]+", "-", identity.lower()).strip("-")[:60]
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        name = f"{slug}-{digest}".lstrip("-")
        return cls(root / "ledger" / (f"{name}.jsonl" if isinstance(root, Path) else name))

    def lock(self) -> AbstractContextManager[None]:
        """Keeps other threads, processes and machines out, but of an object store. The holder may take it again.

        Raises:
            InputError: if it cannot be had.
        """
        return self._lines.lock()

    def entries(self) -> list[Entry]:
        """All releases, oldest first.

        Raises:
            InputError: if the file is damaged or was edited.
        """
        return list(self._read()[0].values())

    def spent(self, delta: float, adjacency: Adjacency) -> float:
        """Composed epsilon of all releases, finished or not."""
        return composed_epsilon((entry.release for entry in self.entries()), delta, adjacency)

    def check(self, release: Release, budget_epsilon: float, delta: float) -> None:
        """Changes nothing.

        Raises:
            BudgetExhausted: if one more such release would pass it.
        """
        _check(self.entries(), release, budget_epsilon, delta)

    @contextmanager
    def charge(self, release: Release, budget_epsilon: float, delta: float) -> Iterator[Callable[[str], Entry]]:
        """Charges a release, then lets the caller make it; holds the lock, if there is one, all the while.

        The caller draws its noise and publishes its artifact inside, then calls what it was given with the
        artifact's sha256. However it ends, the release has been charged.

        Raises:
            InputError: if it would pass the budget, or cannot be written down. No noise has been drawn then.
        """
        entry_id = secrets.token_hex(8)

        def intent(entries: Mapping[str, Entry]) -> dict[str, Any]:
            _check(entries.values(), release, budget_epsilon, delta)
            return {"id": entry_id, "release": release.model_dump(mode="json")}

        with self.lock():
            self._append("intent", intent)
            yield partial(self._finish, entry_id)

    def find(self, stage_key: str) -> Entry | None:
        """The newest finished release with this key."""
        finished = [e for e in self.entries() if e.release.stage_key == stage_key and e.sha256 is not None]
        return finished[-1] if finished else None

    def adopt(self, stage_key: str, sha256: str) -> Entry | None:
        """The release that an artifact found in its place was charged as, or None if it never was.

        Where the process died between publishing the artifact and saying so, this finishes the release.
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
            # Without a lock, another run may have found the artifact already, and finished the release for us.
            return None if entries[entry_id].sha256 == sha256 else {"id": entry_id, "sha256": sha256}

        return self._append("released", finished)[entry_id]

    @property
    def _lines(self) -> LinesOfFile | LinesOfObjects:
        return LinesOfFile(self.file) if isinstance(self.file, Path) else LinesOfObjects(self.file)

    def _read(self) -> tuple[dict[str, Entry], int, str]:
        """The entries by id, the number of lines that hold them, and the last line's check."""
        lines = self._lines.read()
        entries: dict[str, Entry] = {}
        check = ""
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                del event["check"]
                expected, check = _line(event, check)
                if line != expected:
                    raise ValueError("the check does not fit")
                _replay(entries, event)
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    f"line {number} or one before it is damaged, or was edited",
                    str(self.file),
                    "restore it from a backup; nothing was released",
                ) from error
        return entries, len(lines), check

    def _append(
        self, kind: str, follows: Callable[[Mapping[str, Entry]], dict[str, Any] | None]
    ) -> dict[str, Entry]:
        """Writes what follows from the releases so far, and returns only once it is on disk.

        Args:
            follows: gives an event's fields, or None if there is nothing to write; or it raises. It is asked again
                if another run has written something in the meantime.

        Returns:
            The entries by id, with this event.
        """
        with self.lock():
            for _ in tries(self.file):
                entries, count, check = self._read()
                fields = follows(entries)
                if fields is None:
                    break
                event = {"event": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **fields}
                _replay(entries, event)
                if self._lines.append(_line(event, check)[0], after=count):
                    break
            return entries


def _check(entries: Iterable[Entry], release: Release, budget_epsilon: float, delta: float) -> None:
    """Raises BudgetExhausted if one more release would pass the budget."""
    past = [entry.release for entry in entries]
    composed = composed_epsilon([*past, release], delta, release.adjacency)
    if not composed <= budget_epsilon * (1 + RELATIVE_SLACK):
        raise BudgetExhausted(
            f"this release would bring the composed epsilon to {composed:.3g} at delta {delta:.3g}, above the "
            f"budget of {budget_epsilon:g} ({len(past)} release{'' if len(past) == 1 else 's'} so far)",
            "privacy.budget_epsilon",
            "raise it, or keep the target that is there",
        )


def _line(event: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """The event's line without a newline, and its check, which stands for all lines down to it."""
    check = hashlib.sha256((previous + json.dumps(event)).encode()).hexdigest()
    return json.dumps(event | {"check": check}).encode(), check


def _replay(entries: dict[str, Entry], event: dict[str, Any]) -> Entry:
    """Brings the entries up to date with one event.

    Raises:
        ValueError: if it cannot follow those before it: one charge pays for one artifact.
    """
    entry = entries.get(event["id"])
    if event["event"] == "intent" and entry is None:
        entry = Entry(release=event["release"], id=event["id"], time=event["time"])
    elif event["event"] == "released" and entry is not None and entry.sha256 is None:
        entry = entry.model_copy(update={"sha256": event["sha256"]})
    else:
        raise ValueError(f"release {event['id']} was finished before, or never begun")
    entries[entry.id] = entry
    return entry
