"""The privacy ledger: every private release made from one data set, whoever made it and wherever.

    <root>/ledger/<data set>.jsonl          one event per line; beside it its .lock

A release is two events: `intent`, on disk before any noise is drawn, and `released`, once its artifact is
published. What dies in between has been charged: the ledger can count too much, never too little.

Each line carries a digest of all lines down to it. That finds damage and careless edits; it is no signature, and
it cannot tell that the last lines, or the whole file, were taken away.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from filelock import FileLock, Timeout
from pydantic import Field

from gradmm_core.errors import BudgetExhausted, InputError
from gradmm_core.privacy import GaussianMechanism, zcdp_epsilon
from gradmm_core.settings import Positive, Settings, TargetGradientSettings

#: How long to wait for other runs that are releasing from the same data.
LOCK_SECONDS = 600.0

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
    return Release(
        recipe=recipe,
        epsilon=mechanism.epsilon,
        delta=mechanism.delta,
        sigma=mechanism.sigma,
        clipping_norm=mechanism.clipping_norm,
        adjacency=mechanism.adjacency,
        noise="discrete-gaussian" if mechanism.discrete else "gaussian",
        space=f"{settings.space}, centred" if settings.centred else settings.space,
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
    """One data set's ledger. Safe for threads, processes and machines that share its folder."""

    file: Path

    @classmethod
    def of(cls, root: Path, identity: str) -> Ledger:
        """The ledger of the data set with this identity, under a name that a person can tell."""
        slug = re.sub(r"[^a-z0-9]+", "-", identity.lower()).strip("-")[:60]
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        return cls(root / "ledger" / f"{slug}-{digest}.jsonl".lstrip("-"))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other threads, processes and machines out. The holder may take it again.

        Raises:
            InputError: if it cannot be had.
        """
        # While it is held, one object for all ledgers of the file: that is what a thread can take again. It is not
        # kept for longer, as a forked process has to make its own.
        lock = FileLock(f"{self.file}.lock", mode=0o600, is_singleton=True)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            what = f"another run has been releasing from the same data for {LOCK_SECONDS:g} s"
            raise InputError(what, lock.lock_file, "wait for it or end it, then run again") from error
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[Entry]:
        """All releases, oldest first.

        Raises:
            InputError: if the file is damaged or was edited.
        """
        if not self.file.exists():
            return []  # asking leaves no trace
        with self.lock():
            return list(self._read()[0].values())

    def spent(self, delta: float, adjacency: Adjacency) -> float:
        """Composed epsilon of all releases, finished or not."""
        return composed_epsilon((entry.release for entry in self.entries()), delta, adjacency)

    def check(self, release: Release, budget_epsilon: float, delta: float) -> None:
        """Changes nothing.

        Raises:
            BudgetExhausted: if one more such release would pass it.
        """
        past = [entry.release for entry in self.entries()]
        composed = composed_epsilon([*past, release], delta, release.adjacency)
        if not composed <= budget_epsilon * (1 + RELATIVE_SLACK):
            raise BudgetExhausted(
                f"this release would bring the composed epsilon to {composed:.3g} at delta {delta:.3g}, above the "
                f"budget of {budget_epsilon:g} ({len(past)} release{'' if len(past) == 1 else 's'} so far)",
                "privacy.budget_epsilon",
                "raise it, or keep the target that is there",
            )

    @contextmanager
    def charge(self, release: Release, budget_epsilon: float, delta: float) -> Iterator[Callable[[str], Entry]]:
        """Charges a release, then lets the caller make it; holds the lock all the while.

        The caller draws its noise and publishes its artifact inside, then calls what it was given with the
        artifact's sha256. However it ends, the release has been charged.

        Raises:
            InputError: if it would pass the budget, or cannot be written down. No noise has been drawn then.
        """
        with self.lock():
            self.check(release, budget_epsilon, delta)
            entry_id = secrets.token_hex(8)
            self._append("intent", id=entry_id, release=release.model_dump(mode="json"))
            yield partial(self._finish, entry_id)

    def find(self, stage_key: str) -> Entry | None:
        """The newest finished release with this key."""
        finished = [e for e in self.entries() if e.release.stage_key == stage_key and e.sha256 is not None]
        return finished[-1] if finished else None

    def adopt(self, stage_key: str, sha256: str) -> Entry | None:
        """The release that an artifact found in its place was charged as, or None if it never was.

        Where the process died between publishing the artifact and saying so, this finishes the release.
        """
        with self.lock():
            same = [entry for entry in self.entries() if entry.release.stage_key == stage_key]
            known = next((entry for entry in same if entry.sha256 == sha256), None)
            if known or not same or same[-1].sha256 is not None:
                return known
            return self._finish(same[-1].id, sha256)

    def _finish(self, entry_id: str, sha256: str) -> Entry:
        return self._append("released", id=entry_id, sha256=sha256)

    def _read(self) -> tuple[dict[str, Entry], bytes, str]:
        """The entries by id, the bytes that hold them, and the last line's check."""
        content = self.file.read_bytes() if self.file.exists() else b""
        *lines, tail = content.split(b"\n")
        if _breaks_off(tail):
            # The process died while writing it: its intent was not yet on disk, so no noise had been drawn.
            content = content.removesuffix(tail)
        else:
            lines.append(tail)
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
        return entries, content, check

    def _append(self, kind: str, **fields: Any) -> Entry:
        """Writes an event, and returns only once it is on disk."""
        with self.lock():
            entries, content, check = self._read()
            event = {"event": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **fields}
            entry = _replay(entries, event)
            line = _line(event, check)[0] + b"\n"
            try:
                descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                with os.fdopen(descriptor, "ab") as stream:
                    stream.truncate(len(content))
                    stream.write(line if content[-1:] in (b"", b"\n") else b"\n" + line)
                    stream.flush()
                    os.fsync(stream.fileno())
                # A file is on disk only once its name is; its folder may be new too.
                _sync_folder(self.file.parent)
                _sync_folder(self.file.parent.parent)
            except OSError as error:
                raise self._unwritable(error) from error
            return entry

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"the privacy ledger cannot be written ({error.strerror})",
            str(self.file),
            "give it room and permission",
        )


def _breaks_off(line: bytes) -> bool:
    """Whether a last line without its newline is only the beginning of one.

    A whole object is never dropped: were the newline a flipped bit, a release would go uncounted.
    """
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except ValueError:
        return True
    return False


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
