"""Shards on other processes, Ray and Dask: the same bytes, and nothing lost but time when a worker is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import ValidationError

from gradmm.config.recipe import Recipe
from gradmm.config.settings import DataSettings, ExecutionSettings
from gradmm.errors import InputError
from gradmm.flows.distil import distil
from gradmm.flows.runtime import shard_runners
from gradmm.flows.runtime.shard_runners import run_shards
from gradmm.outputs.record import RunRecord
from gradmm.storage.artifacts import Root
from gradmm.storage.location import Location
from gradmm.tasks.runtime.stage_task import RunContext
from tests.object_store import new_bucket, object_store

RUNNERS = ("processes", "ray", "dask")


def run(recipe: Recipe, root: Location) -> RunRecord:
    record = distil(**{name: getattr(recipe, name) for name in Recipe.model_fields}, root=root)
    assert isinstance(record, RunRecord)
    return record


def context_in(folder: Path) -> RunContext:
    data = DataSettings(path=str(folder))
    return RunContext(root=Root(path=folder), recipe="tiny", data=data, labels=(0,), seed=0, device="cpu")


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("in-process")


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["processes", "dask"])
def test_every_runner_makes_the_same_bytes(
    runner: str, tiny_recipe: Callable[..., Recipe], in_process: Path, tmp_path: Path
) -> None:
    expected = run(tiny_recipe(), in_process)
    record = run(tiny_recipe(execution={"runner": runner, "workers": 2}), tmp_path)
    assert [(s.stage, s.sha256) for s in record.stages] == [(s.stage, s.sha256) for s in expected.stages]
    assert len(list(tmp_path.glob("stages/generation_shard/*.parquet"))) == 4
    assert not any(stage.cached for stage in record.stages)


@pytest.mark.slow
def test_on_ray_too_with_nothing_shared_but_an_object_store(
    tiny_recipe: Callable[..., Recipe], in_process: Path
) -> None:
    expected = run(tiny_recipe(), in_process)
    with object_store():
        root = new_bucket("shared") / "team"
        record = run(tiny_recipe(execution={"runner": "ray", "workers": 2}), root)
        assert len(list((root / "stages" / "generation_shard").iterdir())) == 4
    assert [(s.stage, s.sha256) for s in record.stages] == [(s.stage, s.sha256) for s in expected.stages]


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


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
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


@pytest.mark.slow
def test_a_shard_that_kills_every_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_runners, "MAX_ATTEMPTS", 2)
    configured: Any = deadly.with_options(result_storage=tmp_path / "results")
    settings = ExecutionSettings(runner="processes", workers=1)
    with pytest.raises(RuntimeError, match="1 shards were lost with their workers 2 times"):
        list(run_shards(configured, [{"context": context_in(tmp_path), "number": 0}], settings))
    assert len(list((tmp_path / "0").iterdir())) == 2


@task(persist_result=True, cache_policy=NO_CACHE)
def endless(context: RunContext, number: int) -> None:
    """All but the first one take until the test is over."""
    begin(context, number)
    if number:
        time.sleep(300)
        begin(context, number)


@pytest.mark.slow
def test_a_run_that_stops_does_not_wait_for_its_workers(tmp_path: Path) -> None:
    configured: Any = endless.with_options(result_storage=tmp_path / "results")
    settings = ExecutionSettings(runner="processes", workers=2)
    calls = [{"context": context_in(tmp_path), "number": number} for number in range(3)]
    with closing(run_shards(configured, calls, settings)) as states:
        number, _ = next(states)
    assert number == 0
    assert not multiprocessing.active_children()
    assert not list(tmp_path.glob("[12]/2"))


@pytest.mark.parametrize("runner", ["ray", "dask"])
def test_a_runner_that_is_not_installed_is_told_in_one_line(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefect_ray", "prefect_ray.task_runners", "prefect_dask", "prefect_dask.task_runners"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"execution.runner={runner}.*pip install 'gradmm\[{runner}\]'"):
        shard_runners.task_runner(ExecutionSettings.model_validate({"runner": runner}))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"workers": 2}, "workers: runner=in-process uses none"),
        ({"runner": "processes", "address": "tcp://x"}, "address: runner=processes uses no cluster"),
        (
            {"runner": "dask", "address": "tcp://x", "workers": 2},
            "workers: determined by the cluster at the address",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ExecutionSettings.model_validate(values)


def test_processes_share_out_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    runner = shard_runners.task_runner(ExecutionSettings(runner="processes"))
    assert runner._max_workers == 2  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(3):
        runner._initializer(*runner._initargs)  # pyright: ignore[reportAttributeAccessIssue]
    assert chosen == [0, 1, 0]


def test_a_ray_worker_asks_for_a_gpu_only_where_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect_ray.context import RemoteOptionsContext

    def asked(runner: str, device: str) -> dict:
        with shard_runners._ray_gpu(ExecutionSettings.model_validate({"runner": runner}), device):
            return RemoteOptionsContext.get().current_remote_options

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert asked("ray", "auto") == asked("ray", "cpu") == asked("dask", "cuda") == {}
    assert asked("ray", "cuda:0") == {"num_gpus": 1}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert asked("ray", "auto") == {"num_gpus": 1}
