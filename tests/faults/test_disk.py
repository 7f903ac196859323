"""A disk that is full, or read-only, at any stage: one line, nothing half-written, and the next run goes on.

Elsewhere: a disk too full for the first stage (`tests/flows/test_cli.py`), a root that cannot be made
(`test_cli.py`, `tests/unit/storage/test_artifacts.py`), a write that fails (`test_artifacts.py`,
`test_release.py`).
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from gradmm.storage.atomic import NAME
from tests.faults.child import Ended, Runner
from tests.faults.conftest import Watched
from tests.faults.fault import Fault
from tests.flows.test_cli import small_disk as small_disk

pytestmark = pytest.mark.faults

SEED, MOMENTS = 7, 5


def half_written(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if NAME.fullmatch(path.name)]


def test_a_disk_that_fills_up_in_any_stage_or_at_the_ledger(
    finished: tuple[Watched, Ended], small_disk: Path, runner: Runner
) -> None:
    _, undisturbed = finished
    root = Watched(small_disk, runner)
    writes = dict.fromkeys(
        event
        for event in undisturbed.events
        if (event.startswith(("open stages/", "open ledger/")) and not event.endswith(".lock"))
        or event in ("open runs/RUN/.release.TEMPORARY/.README.md.TEMPORARY", "open runs/RUN/.run.json.TEMPORARY")
    )
    assert len(writes) == 13 + 3 + 2  # stages, the ledger with its digests and their key, the run's folder
    for write in writes:
        ended = root.run(Fault("fill", write))
        assert write in ended.events
        assert "No space left on device" in ended.complaint
        assert half_written(small_disk) == []
        (small_disk / "filler").unlink()
    root.finish()


def test_a_root_that_is_read_only(small_disk: Path, runner: Runner) -> None:
    (small_disk / "runs").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    ended = runner(small_disk)
    assert "cannot be written (Read-only file system); choose another folder" in ended.complaint
    assert [path.name for path in small_disk.rglob("*")] == ["runs"]


@pytest.mark.parametrize(("error", "words"), [("EROFS", "Read-only file system"), ("ENOSPC", "No space left")])
def test_a_disk_that_fails_from_some_moment_on(
    finished: tuple[Watched, Ended], watched: Watched, error: str, words: str
) -> None:
    _, undisturbed = finished
    moments = random.Random(SEED).sample(range(len(undisturbed.events)), MOMENTS)
    for moment in sorted(moments):
        ended = watched.run(Fault(error, undisturbed.events[moment]))  # pyright: ignore[reportArgumentType]
        assert words in ended.complaint
    watched.finish()
