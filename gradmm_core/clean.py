"""What no run needs any more: found by what the runs' records, the stages' Parquets and the ledger refer to.

Kept are, however old: every run folder and release; every ledger; every stage that a run's record names, and what
that was made from (the Parquets say so themselves, by digests); every noisy target that a ledger has charged, as
drawing it again would be one more release; and all that is younger than asked, for runs that are still going on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gradmm_core.artifacts import METADATA_KEY, file_digest
from gradmm_core.errors import InputError
from gradmm_core.ledger import Ledger

TARGET = "target_gradient"


@dataclass(frozen=True)
class Removable:
    """A file, or a folder with all that is in it, that no run needs. `size` is in bytes."""

    path: Path
    size: int
    reason: str


def removable(root: Path, before: float) -> list[Removable]:
    """What could go, in the order of paths. Nothing is changed.

    Args:
        before: what was written later than this stays (seconds since the epoch).

    Raises:
        InputError: if a run's record or a ledger cannot be read, so that nobody knows what it refers to.
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
        "results/*": "of a task that failed",
        "unfinished/*": "left by a run that was killed",
        "plots/*": "drawn again where it is missing",
        "stages/*/.*": "left by a run that was killed",
        "runs/*/.*": "left by a run that was killed",
        ".demo-*": "left by a run that was killed",
    }.items():
        for path in root.glob(pattern):
            is_left_over = path.name.startswith(".")
            if (path.is_file() or is_left_over) and path.name != ".probe" and _written(path) < before:
                found[path] = reason
    return [Removable(path, _size(path), reason) for path, reason in sorted(found.items())]


def remove(found: Iterable[Removable]) -> None:
    """Removes them; what is gone by now is no error."""
    for each in found:
        if each.path.is_dir() and not each.path.is_symlink():
            shutil.rmtree(each.path)
        else:
            each.path.unlink(missing_ok=True)


def _needed(root: Path) -> set[Path]:
    """Stages' files that runs and ledgers refer to, and what those were made from."""
    by_digest: dict[str, list[Path]] = {}
    for file in root.glob("stages/*/*.parquet"):
        by_digest.setdefault(file_digest(file), []).append(file)
    waiting = [*_of_runs(root), *_of_ledgers(root, by_digest)]
    needed: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in needed:
            needed.add(file)
            waiting += [each for digest in _upstream(file) for each in by_digest.get(digest, [])]
    return needed


def _of_runs(root: Path) -> Iterator[Path]:
    """The stages that runs' records name, where they would be if the root was moved since."""
    for file in root.glob("runs/*/run.json"):
        try:
            for stage in json.loads(file.read_bytes())["stages"]:
                yield root / "stages" / stage["stage"] / Path(stage["path"]).name
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                "is damaged, and what it refers to is not known",
                str(file),
                "restore or remove it; nothing was removed",
            ) from error


def _of_ledgers(root: Path, by_digest: dict[str, list[Path]]) -> Iterator[Path]:
    """The targets that were charged: by the digest of what was released, and by the key of what was begun."""
    for file in root.glob("ledger/*.jsonl"):
        for entry in Ledger(file).entries():
            yield root / "stages" / TARGET / f"{entry.release.stage_key}.parquet"
            yield from by_digest.get(entry.sha256 or "", [])


def _upstream(file: Path) -> set[str]:
    """The digests of what a Parquet was made from; none if it is missing or damaged."""
    try:
        metadata = pq.read_schema(file).metadata
        return set(_words(json.loads(metadata[METADATA_KEY])["upstream"]))
    except (OSError, pa.ArrowException, TypeError, KeyError, ValueError):
        return set()


def _words(value: Any) -> Iterator[str]:
    """All strings in a JSON value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _words(each)


def _written(path: Path) -> float:
    """When the path, or the last of what is in it, was written."""
    within = path.rglob("*") if path.is_dir() else ()
    return max(each.lstat().st_mtime for each in (path, *within))


def _size(path: Path) -> int:
    within = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.lstat().st_size for each in within if not each.is_dir())
