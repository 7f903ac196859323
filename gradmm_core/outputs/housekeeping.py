"""Find and remove files under a root that no run needs, by the references in run records, Parquets and the ledger.

Kept whatever their age: run folders and release folders; ledgers; the stages that a run's record names, and their
inputs (by the upstream digests in each Parquet); contamination audits, which may be in no record yet; everything
that a ledger has charged, because drawing it again would be another release. Files younger than a given time are
kept too: a run may still be using them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gradmm.errors import InputError
from gradmm.privacy.ledger import Ledger
from gradmm.storage.artifacts import METADATA_KEY, file_digest

_KILLED = "left by a killed run"

#: Glob pattern of a cache key. Other files in the same folders are somebody else's.
_KEY = "[0-9a-f]" * 32

#: Glob patterns of files by which a folder is recognised as the root of runs.
_TRACES = ("stages/*/*.parquet", "runs/*/run.json", "ledger/*.jsonl")


@dataclass(frozen=True)
class Removable:
    """A file, or a folder with its content, that no run needs. `size` is in bytes."""

    path: Path
    size: int
    reason: str


def check_root(root: Path) -> None:
    """Check that a run has written to a folder.

    Raises:
        InputError: if none has: what lies there is somebody else's.
    """
    if not any(next(root.glob(pattern), None) for pattern in _TRACES):
        raise InputError("no run has written here", str(root), "give the root of your runs")


def removable(root: Path, before: float) -> list[Removable]:
    """List the files and folders that no run needs, sorted by path. Nothing is changed.

    Args:
        before: files written after this time are kept (seconds since the epoch).

    Raises:
        InputError: if a run's record or a ledger cannot be read, so that its references are unknown.
    """
    needed = _needed(root)
    found: dict[Path, str] = {}
    for file in root.glob("stages/*/*.parquet"):
        if file not in needed and _written(file) < before:
            found[file] = "no run refers to it"
    for record in root.glob("results/*/*"):
        stage = root / "stages" / record.parent.name / f"{record.name}.parquet"
        if stage in found or not stage.exists():
            found[record] = "its stage is gone"
    for pattern, reason in {
        f"results/{_KEY}": "left by a failed task",
        f"unfinished/*-{_KEY}": _KILLED,
        f"plots/{_KEY}.md": "redrawn when missing",
        "stages/*/.*": _KILLED,
        "runs/*/.*": _KILLED,
        ".demo-*": _KILLED,
    }.items():
        for path in root.glob(pattern):
            is_left_over = path.name.startswith(".")
            if (path.is_file() or is_left_over) and path.name != ".probe" and _written(path) < before:
                found[path] = reason
    return [Removable(path, _size(path), reason) for path, reason in sorted(found.items())]


def remove(found: Iterable[Removable]) -> None:
    """Remove files and folders. One that has disappeared is skipped."""
    for each in found:
        with suppress(FileNotFoundError):
            if each.path.is_dir() and not each.path.is_symlink():
                shutil.rmtree(each.path)
            else:
                each.path.unlink()


def _needed(root: Path) -> set[Path]:
    """Return the stage files that runs and ledgers refer to, and all their inputs."""
    by_digest: dict[str, list[Path]] = {}
    for file in root.glob("stages/*/*.parquet"):
        by_digest.setdefault(file_digest(file), []).append(file)
    waiting = [*_of_runs(root), *_of_ledgers(root, by_digest), *root.glob("stages/contamination/*.parquet")]
    needed: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in needed:
            needed.add(file)
            waiting += [each for digest in _upstream(file) for each in by_digest.get(digest, [])]
    return needed


def _of_runs(root: Path) -> Iterator[Path]:
    """Yield the stage files named by run records, at their place in this root, which may have been moved."""
    for file in root.glob("runs/*/run.json"):
        try:
            for stage in json.loads(file.read_bytes())["stages"]:
                yield root / "stages" / stage["stage"] / Path(stage["path"]).name
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                "is damaged: the stages that it refers to are unknown",
                str(file),
                "restore or remove it; nothing was removed",
            ) from error


def _of_ledgers(root: Path, by_digest: dict[str, list[Path]]) -> Iterator[Path]:
    """Yield the charged releases: finished ones by digest, unfinished ones by stage key."""
    for file in root.glob("ledger/*.jsonl"):
        for entry in Ledger(file).entries():
            if entry.release.stage_key:
                yield from root.glob(f"stages/*/{entry.release.stage_key}.parquet")
            yield from by_digest.get(entry.sha256 or "", [])


def _upstream(file: Path) -> set[str]:
    """Return the digests of a Parquet's inputs; none if it is missing or damaged."""
    try:
        metadata = pq.read_schema(file).metadata
        return set(_strings(json.loads(metadata[METADATA_KEY])["upstream"]))
    except (OSError, pa.ArrowException, TypeError, KeyError, ValueError):
        return set()


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a nested JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _written(path: Path) -> float:
    """Return the latest modification time of a path and its content; infinity if something of it disappears."""
    try:
        return max(each.lstat().st_mtime for each in (path, *(path.rglob("*") if path.is_dir() else ())))
    except FileNotFoundError:  # a running process has renamed its temporary file
        return math.inf


def _size(path: Path) -> int:
    within = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.lstat().st_size for each in within if each.is_file())
