"""Two runs on one root, at once or one after the other with the clock set back.

Elsewhere: two runs of a deployment, which takes one at a time (`tests/e2e/test_deployments.py`); processes and
threads that race for a budget (`tests/unit/privacy/test_ledger.py`, `test_ledger_objects.py`); runs of one second
(`test_s3_root.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import IN_GENERATION, Watched, are_the_same, contents
from tests.faults.fault import Fault

pytestmark = pytest.mark.faults


def two_at_once(watched: Watched, fault: Fault | None) -> list[int]:
    """How both ended."""
    processes = [watched.runner.start(watched.path, fault) for _ in range(2)]
    ends = [process.end() for process in processes]
    watched.draws = sum(ended.events.count("draw") for ended in ends)
    assert watched.draws == len(watched.ledger())
    return [ended.status for ended in ends]


def test_two_runs_at_once_draw_one_target_and_make_the_same(watched: Watched) -> None:
    assert two_at_once(watched, None) == [0, 0]
    assert watched.draws == 1
    first, second = (
        {file.relative_to(run).as_posix(): file.read_bytes() for file in (run / "release").rglob("*.*")}
        for run in watched.path.glob("runs/*")
    )
    assert first == second
    watched.finish()


def test_of_two_runs_one_takes_the_lock_of_the_other_that_was_killed_with_it(watched: Watched) -> None:
    assert two_at_once(watched, Fault("kill", "rename stages/target_gradient/*.parquet")) == [-9, -9]
    assert watched.draws == 2
    watched.finish()


def test_a_clock_that_was_set_back_changes_nothing(watched: Watched) -> None:
    day = 86400.0
    ahead = replace(watched, runner=replace(watched.runner, clock=day))
    behind = replace(watched, runner=replace(watched.runner, clock=-day))
    assert ahead.run(Fault("kill", IN_GENERATION)).status == -9
    ended = behind.run()
    assert ended.status == 0, ended.said
    assert "draw" not in ended.events
    (entry,) = watched.ledger()
    assert entry.sha256 in ahead.targets
    watched.is_as_undisturbed()
    before = contents(watched.path)
    again = watched.run()
    assert again.status == 0, again.said
    assert "draw" not in again.events
    are_the_same(contents(watched.path), before)
    (record,) = (run for run in watched.path.glob("runs/*") if run.name < again_id(again.said))
    assert record.is_dir()


def again_id(said: str) -> str:
    """The id of the run that a table was printed of."""
    return Path(said.split("dataset:")[1].split()[0]).parent.name
