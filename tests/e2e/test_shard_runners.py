"""Shards on other processes, Ray and Dask make the same bytes. `faults/test_workers.py` kills workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from gradmm.config.recipe import Recipe
from gradmm.config.settings import ExecutionSettings
from gradmm.errors import InputError
from gradmm.flows.distil import distil
from gradmm.flows.runtime import shard_runners
from gradmm.outputs.record import RunRecord
from gradmm.storage.location import Location
from tests.object_store import new_bucket, object_store


def run(recipe: Recipe, root: Location) -> RunRecord:
    record = distil(**{name: getattr(recipe, name) for name in Recipe.model_fields}, root=root)
    assert isinstance(record, RunRecord)
    return record


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("in-process")


@pytest.mark.slow
@pytest.mark.nightly  # each worker takes seconds to start; `faults/test_workers.py` starts some every time
@pytest.mark.parametrize(("runner", "workers"), [("processes", 1), ("processes", 2), ("dask", 2)])
def test_every_runner_makes_the_same_bytes(
    runner: str, workers: int, tiny_recipe: Callable[..., Recipe], in_process: Path, tmp_path: Path
) -> None:
    expected = run(tiny_recipe(), in_process)
    record = run(tiny_recipe(execution={"runner": runner, "workers": workers}), tmp_path)
    assert [(s.stage, s.sha256) for s in record.stages] == [(s.stage, s.sha256) for s in expected.stages]
    assert len(list(tmp_path.glob("stages/generation_shard/*.parquet"))) == 4
    assert not any(stage.cached for stage in record.stages)


def test_no_worker_starts_for_shards_that_are_there(
    tiny_recipe: Callable[..., Recipe], in_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny_recipe(), in_process)
    monkeypatch.setattr(shard_runners, "task_runner", lambda _: pytest.fail("workers were started"))
    record = run(tiny_recipe(execution={"runner": "processes", "workers": 2}), in_process)
    assert all(stage.cached for stage in record.stages if stage.stage != "memorisation")


@pytest.mark.nightly
def test_on_ray_too_with_nothing_shared_but_an_object_store(
    tiny_recipe: Callable[..., Recipe], in_process: Path
) -> None:
    expected = run(tiny_recipe(), in_process)
    with object_store():
        root = new_bucket("shared") / "team"
        record = run(tiny_recipe(execution={"runner": "ray", "workers": 2}), root)
        assert len(list((root / "stages" / "generation_shard").iterdir())) == 4
    assert [(s.stage, s.sha256) for s in record.stages] == [(s.stage, s.sha256) for s in expected.stages]


@pytest.mark.parametrize("runner", ["ray", "dask"])
def test_a_runner_that_is_not_installed_is_told_in_one_line(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefect_ray", "prefect_ray.task_runners", "prefect_dask", "prefect_dask.task_runners"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"execution.runner={runner}.*pip install 'gradmm\[{runner}\]'"):
        shard_runners.task_runner(ExecutionSettings.model_validate({"runner": runner}))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "127.0.0.1:9", "nonsense", "tcp://127.0.0.1:port"])
@pytest.mark.parametrize("runner", ["ray", "dask"])
def test_a_cluster_that_does_not_answer_is_told_in_one_line(runner: str, address: str) -> None:
    settings = ExecutionSettings.model_validate({"runner": runner, "address": address})
    with pytest.raises(InputError, match=rf"execution\.address: no cluster answers at {address} \("):
        shard_runners.check_cluster(settings)


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
        shard_runners._select_gpu(*runner._initargs)  # pyright: ignore[reportAttributeAccessIssue]
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


def test_a_process_pool_that_ends_at_once_says_nothing() -> None:
    """Python's resource tracker removes what the pool leaves, after the process has ended."""
    lines = (
        "import os; from gradmm.config.settings import ExecutionSettings; "
        "from gradmm.flows.runtime.shard_runners import task_runner; "
        "runner = task_runner(ExecutionSettings(runner='processes', workers=1)); os._exit(1)"
    )
    # The pipe is at its end when the tracker, which inherits it, has ended too.
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
