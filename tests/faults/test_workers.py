"""Workers that die, and runs that stop while workers are busy: nothing is lost but time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from gradmm.config.settings import DataSettings, ExecutionSettings
from gradmm.errors import InputError
from gradmm.flows.runtime import shard_runners
from gradmm.flows.runtime.shard_runners import run_shards
from gradmm.storage.artifacts import Root
from gradmm.tasks.runtime.stage_task import RunContext

pytestmark = pytest.mark.faults


def context_in(folder: Path) -> RunContext:
    data = DataSettings(path=str(folder))
    return RunContext(root=Root(path=folder), recipe="tiny", data=data, labels=(0,), seed=0, device="cpu")


def begin(context: RunContext, number: int) -> int:
    """Leaves a file for each time that a shard is begun. Returns how often this one was."""
    folder = context.root.path / str(number)
    folder.mkdir(exist_ok=True)
    times = len(list(folder.iterdir())) + 1
    (folder / str(times)).touch()
    return times


@task(persist_result=True, cache_policy=NO_CACHE)
def fragile(context: RunContext, number: int) -> tuple[int, int, int | None]:
    """The second shard's first worker dies of it."""
    times = begin(context, number)
    if number == 1 and times == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        raise InputError("is wrong", "the shard", "mend it")
    return number, os.getpid(), context.threads


@pytest.mark.parametrize("runner", ["processes", "ray", "dask"])
def test_a_killed_worker_costs_nothing_but_time_and_errors_arrive(runner: str, tmp_path: Path) -> None:
    settings = ExecutionSettings.model_validate({"runner": runner, "workers": 2})
    configured: Any = fragile.with_options(result_storage=tmp_path / "results")
    calls = [{"context": context_in(tmp_path), "number": number} for number in range(4)]
    with closing(run_shards(configured, calls, settings)) as states:
        ended = dict(states)
    assert sorted(ended) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="is wrong"):
        ended.pop(2).result()
    made: dict[int, Any] = {number: state.result() for number, state in ended.items()}
    threads = torch.get_num_threads()  # theirs too, though nothing was said of it
    assert {number: (of, its) for number, (of, _, its) in made.items()} == {n: (n, threads) for n in (0, 1, 3)}
    assert os.getpid() not in {process for _, process, _ in made.values()}
    assert (tmp_path / "1" / "2").exists()


@task(persist_result=True, cache_policy=NO_CACHE)
def deadly(context: RunContext, number: int) -> None:
    begin(context, number)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_shard_that_kills_every_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_runners, "MAX_ATTEMPTS", 2)
    configured: Any = deadly.with_options(result_storage=tmp_path / "results")
    settings = ExecutionSettings(runner="processes", workers=1)
    with pytest.raises(InputError, match="1 shards were lost with their workers 2 times"):
        list(run_shards(configured, [{"context": context_in(tmp_path), "number": 0}], settings))
    assert len(list((tmp_path / "0").iterdir())) == 2


@task(persist_result=True, cache_policy=NO_CACHE)
def endless(context: RunContext, number: int) -> None:
    """All but the first one take until the test is over."""
    begin(context, number)
    if number:
        time.sleep(300)
        begin(context, number)


def test_a_run_that_stops_does_not_wait_for_its_workers(tmp_path: Path) -> None:
    configured: Any = endless.with_options(result_storage=tmp_path / "results")
    settings = ExecutionSettings(runner="processes", workers=2)
    calls = [{"context": context_in(tmp_path), "number": number} for number in range(3)]
    with closing(run_shards(configured, calls, settings)) as states:
        number, _ = next(states)
    assert number == 0
    assert not multiprocessing.active_children()
    assert not list(tmp_path.glob("[12]/2"))
