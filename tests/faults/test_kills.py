"""Runs that are killed again and again go on to what an undisturbed one makes, and the ledger counts every draw.

Tested elsewhere: a run killed or interrupted during generation (`tests/flows/test_cli.py`); a
deployment's run, with its process (`test_deployments.py`); workers of process pools, Ray and Dask
(`test_workers.py`); a target between charge and publication, by an exception (`test_privacy.py`); a process
that releases, at any time of the clock (`tests/unit/privacy/test_ledger.py`).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.child import Ended, Runner
from tests.faults.conftest import Watched
from tests.faults.fault import Fault

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

SEED, KILLS, AT_ANY_MOMENT = 20261121, 53, 28

#: How many events lie between two kills, at most: a run has some 250.
FURTHEST = 36

TARGET = "stages/target_gradient"


def around_what_counts(events: tuple[str, ...]) -> list[Fault]:
    """Kills around the ledger's lines, each Parquet and its record, in the order in which a run gets there."""
    (line,) = {event for event in events if event.startswith("fsync ledger/") and event.endswith(".jsonl")}
    assert events.count(line) == 3
    of_target = [
        Fault("torn", line),  # half of the budget is written
        Fault("kill", line),  # or all of it
        Fault("torn", line),  # half of the intent is written
        Fault("kill", line),  # or all of it
        Fault("kill", f"open {TARGET}/.*.parquet.TEMPORARY"),
        Fault("torn", f"fsync {TARGET}/.*.parquet.TEMPORARY"),
        Fault("kill", f"rename {TARGET}/*.parquet"),
        Fault("torn", line, passed=1),  # the target is there, and half of its line
        Fault("kill", "remove unfinished/target_gradient-*"),
        Fault("kill", "open results/target_gradient/*"),
    ]
    kills: list[Fault] = []
    records = [event for event in dict.fromkeys(events) if event.startswith("open results/")]
    for number, record in enumerate(records):
        if record == "open results/target_gradient/*":
            kills += of_target
        else:  # the Parquet is there, and no record of it, or half of one
            kills.append(Fault(("kill", "torn")[number % 2], record))
    for name in ("release", "report.html", "run.json"):
        kills.append(Fault("kill", f"rename runs/RUN/{name}"))
    return kills


def test_kills_around_everything_that_is_recorded(finished: tuple[Watched, Ended], watched: Watched) -> None:
    kills = around_what_counts(finished[1].events)
    assert len(kills) == KILLS - AT_ANY_MOMENT
    for fault in kills:
        ended = watched.run(fault)
        assert ended.status == -9, (fault, ended.said)
        assert ended.events[-1] == fault.label
    watched.finish()


def test_kills_at_any_moment(runner: Runner, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    roots = [Watched(tmp_path / "0", runner)]
    struck: list[str] = []
    while len(struck) < AT_ANY_MOMENT:
        how = "torn" if draw.random() < 0.3 else "kill"
        ended = roots[-1].run(Fault(how, passed=draw.randrange(1, FURTHEST)))
        if ended.status == -9:
            struck.append(ended.events[-1])
        else:  # it came to its end before that
            assert ended.status == 0, ended.said
            roots[-1].is_as_undisturbed()
            roots.append(Watched(tmp_path / f"{len(roots)}", runner))
    roots[-1].finish()
    places = {Path(event.split()[1]).parts[0] for event in struck if event.split()[1] != "."}
    assert places >= {"stages", "results", "ledger"}
