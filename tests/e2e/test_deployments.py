"""Deployments on a real server: `gradmm serve` in a process of its own, with all that it starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import UUID, uuid4

import pandas as pd
import pytest
import yaml
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from gradmm.deployments.cli.main import main
from gradmm.deployments.serving.serve import CRASH_AUTOMATION, keep_crash_automation
from gradmm.lm.model_reference import ModelReference
from gradmm.outputs.record import RunRecord
from gradmm.storage.artifacts import StageArtifact
from tests.conftest import prefect_home
from tests.e2e.browser import browse, eventually, needs_chromium, pixels_of_plots
from tests.flows.conftest import STAGES_OF_THE_PAPER, tiny_recipe_values

CRON = "0 6 1 1 *"
#: Shards of the slow recipe, of a second or two each where nothing else runs.
SHARDS = 16
SLOW = {"per_class": SHARDS // 2, "shard_size": 1, "search": {"draws": 6000, "rounds": 1}}
FIRST_RUNS = {"stopped": 1, "plain": 2, "private": 1}
#: How long to wait for anything: many times what it takes where nothing else runs.
LIMIT_SECONDS = 240

pytestmark = pytest.mark.slow


class Served(NamedTuple):
    """A `gradmm serve` that is going on."""

    api: str
    folder: Path
    environment: dict[str, str]

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def data(self, recipe: str) -> Path:
        return self.folder / "data" / recipe


@pytest.fixture(scope="module", autouse=True)
def prefect_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, tiny_model: ModelReference, migrated_database: Path
) -> Iterator[Served]:
    """Instead of the session's: a server that `gradmm serve` started, and that is gone when it is stopped."""
    folder = tmp_path_factory.mktemp("served")
    recipes = folder / "recipes"
    recipes.mkdir()
    for name, changes in {
        "plain": {},
        "private": {"privacy": {"epsilon": 1.0, "delta": 1e-5}},
        "stopped": {"generation": tiny_recipe_values(tiny_data, tiny_model)["generation"] | SLOW},
    }.items():
        shutil.copytree(tiny_data, folder / "data" / name)
        values = tiny_recipe_values(folder / "data" / name, tiny_model) | {"name": name} | changes
        (recipes / f"{name}.yaml").write_text(yaml.safe_dump(values))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        **prefect_home(folder / "home", migrated_database),
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "gradmm.deployments.cli.main", "serve", "demo",
               "--recipes", recipes, "--cron", CRON, "--root", folder / "root",
               "--port", str(port), "--limit", "3"]  # fmt: skip
    log = folder / "log"
    with (
        log.open("wb") as said,
        subprocess.Popen(
            command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            wait_for(lambda: "prefect deployment run gradmm/" in log.read_text() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            api = f"http://127.0.0.1:{port}/api"
            assert f"export PREFECT_API_URL={api}\n" in log.read_text()
            with temporary_settings({PREFECT_API_URL: api}):
                yield Served(api, folder, environment | {"PREFECT_API_URL": api})
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
            assert log.read_text().endswith("resume when run again\n")
        finally:
            process.kill()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


@pytest.fixture(scope="module", autouse=True)
def first_runs(prefect_server: Served) -> dict[str, list[FlowRun]]:
    """What tests begin with, asked for at once: no test waits for what could have begun before."""
    return {name: [start(name) for _ in range(runs)] for name, runs in FIRST_RUNS.items()}


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def start(recipe: str, **parameters: object) -> FlowRun:
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"gradmm/{recipe}")
        # The client asks again where no answer came, and the key makes that one run however often it was heard.
        key = str(uuid4())
        return client.create_flow_run_from_deployment(deployment.id, parameters=parameters, idempotency_key=key)


def now(run: FlowRun) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run.id)


def runs_of(recipe: str) -> dict[UUID, FlowRun]:
    """Those that were asked for, by anyone; not those that the schedule has for later."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"gradmm/{recipe}")
        return {run.id: run for run in client.read_flow_runs(limit=200)
                if run.deployment_id == deployment.id and not run.auto_scheduled}  # fmt: skip


def finished(run: FlowRun) -> FlowRun:
    """The run, once it has ended."""
    with get_client(sync_client=True) as client:  # one for all questions: making one takes as long as many of them
        wait_for(lambda: (state := client.read_flow_run(run.id).state) and state.is_final())
        return client.read_flow_run(run.id)


def named(run: FlowRun) -> str:
    """The name of the state that a run ends in."""
    state = finished(run).state
    assert state is not None
    return state.name or ""


def command(served: Served, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=served.environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def records(served: Served, recipe: str) -> list[RunRecord]:
    """What the finished runs of a recipe left, oldest first."""
    files = sorted((served.root / "runs").glob(f"*-{recipe}*/run.json"), key=lambda file: file.stat().st_mtime_ns)
    return [RunRecord.model_validate_json(file.read_text()) for file in files]


def ran(record: RunRecord) -> list[str]:
    """The stages that were not cached."""
    return [stage.stage for stage in record.stages if not stage.cached]


def check_all_files(record: RunRecord) -> None:
    """Raises for one that is missing or damaged."""
    for stage in record.stages:
        StageArtifact.model_validate(stage.model_dump(include=set(StageArtifact.model_fields)))


def shards(served: Served) -> dict[Path, int]:
    """The finished ones of the slow recipe, which alone has so many draws, with their times of writing."""
    return {
        file: file.stat().st_mtime_ns
        for file in (served.root / "stages" / "generation_shard").glob("*.parquet")
        if (served.root / "results" / "generation_shard" / file.stem).exists()
        and b'"draws": 6000' in file.read_bytes()
    }


def test_a_run_that_is_cancelled_or_killed_goes_on_in_the_next_one(
    prefect_server: Served, first_runs: dict[str, list[FlowRun]]
) -> None:
    (cancelled,) = first_runs["stopped"]  # the first test, so that this one is still going on
    wait_for(lambda: shards(prefect_server))
    command(prefect_server, "prefect", "flow-run", "cancel", str(cancelled.id))
    assert named(cancelled) == "Cancelled"
    assert not processes_of(cancelled)
    after_cancelling = shards(prefect_server)
    assert 1 <= len(after_cancelling) < SHARDS

    killed = start("stopped")
    wait_for(lambda: len(shards(prefect_server)) > len(after_cancelling))
    for process in processes_of(killed):
        os.kill(process, signal.SIGKILL)
    assert named(killed) == "Crashed"
    after_killing = shards(prefect_server)
    assert len(after_killing) < SHARDS

    assert named(start("stopped")) == "Completed"
    at_the_end = shards(prefect_server)
    assert len(at_the_end) == SHARDS
    assert at_the_end.items() >= after_killing.items() >= after_cancelling.items()
    assert records(prefect_server, "stopped")[-1].stage("target_gradient").cached


def test_cron_creates_runs_of_every_deployment(prefect_server: Served) -> None:
    with get_client(sync_client=True) as client:
        ours = {client.read_deployment_by_name(f"gradmm/{name}").id for name in ("plain", "private", "demo")}

        def scheduled() -> list[FlowRun]:
            return [run for run in client.read_flow_runs(limit=200) if run.auto_scheduled]

        wait_for(lambda: {run.deployment_id for run in scheduled()} >= ours)
        for run in scheduled():
            assert run.expected_start_time is not None
            assert run.expected_start_time > datetime.now(UTC)
            assert f"{run.expected_start_time.astimezone(UTC):%m-%d %H:%M}" == "01-01 06:00"


def test_the_form_of_a_run_is_filled_in(prefect_server: Served) -> None:
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("gradmm/demo")
    assert deployment.parameters["generation"]["per_class"] == 200
    assert deployment.parameters["generation"]["search"]["draws"] == 40
    assert deployment.parameters["root"] == str(prefect_server.root)
    assert deployment.parameter_openapi_schema is not None
    described = deployment.parameter_openapi_schema["definitions"]["PrivacySettings"]["properties"]
    assert (
        described["declared_records"]["description"]
        == "Declared number of records to train on. Public; need not be exact."
    )
    assert deployment.global_concurrency_limit is not None
    assert deployment.global_concurrency_limit.limit == 1
    assert deployment.version
    assert deployment.tags == ["gradmm", "no-guarantee"]


def test_an_override_with_an_unknown_or_a_missing_setting_is_refused(prefect_server: Served) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    for parameters, what in (
        ({"generation": {"per_clas": 6}}, "'per_clas' was unexpected"),
        ({"model": {"device": "cpu"}}, "'name' is a required property"),
        ({"privacy": {"epsilon": -1}}, "-1"),
    ):
        with pytest.raises(PrefectHTTPStatusError) as refused:
            start("plain", **parameters)
        assert what in refused.value.response.text


def test_notify_names_a_recipe_that_is_not_served(
    prefect_server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["notify", "sst2"]) == 2
    assert "no deployment gradmm/sst2; serve it with `gradmm serve`" in capsys.readouterr().err


def test_of_two_runs_at_once_one_does_the_work_and_the_other_finds_nothing_to_do(
    prefect_server: Served, first_runs: dict[str, list[FlowRun]]
) -> None:
    assert sorted(map(named, first_runs["plain"])) == ["Completed", "Unchanged"]
    found = records(prefect_server, "plain")
    assert len(found) == 2, (
        [record.started for record in found],
        [run.state for run in runs_of("plain").values()],
    )
    one, other = found
    assert "generation" in ran(one)  # another recipe has the same data, and may have been first with the target
    assert ran(other) == []
    for stage, same in zip(one.stages, other.stages, strict=True):
        assert stage.sha256 == same.sha256
    check_all_files(other)


@needs_chromium
def test_a_person_sees_the_form_the_run_its_stages_and_a_plot(
    prefect_server: Served, first_runs: dict[str, list[FlowRun]], tmp_path: Path
) -> None:
    (run,) = [run for run in first_runs["plain"] if named(run) == "Completed"]
    ui = prefect_server.api.removesuffix("/api") + "/v2"

    def shows(page: str, *words: str) -> bool:
        html = browse(ui + page, tmp_path, "--dump-dom")
        return all(f">{word}" in html for word in words)

    fields = (
        "Per Class",
        "Clipping Norm",
        "Learning Rates",
        "Target gradient for the synthetic texts to match.",
    )
    assert eventually(lambda: shows(f"/deployments/deployment/{run.deployment_id}/run", *fields))
    keys = [f"plain-{stage.replace('_', '-')}" for stage in (*STAGES_OF_THE_PAPER, "texts", "result")]
    assert eventually(lambda: shows(f"/runs/flow-run/{run.id}?tab=Artifacts", *keys))
    with get_client(sync_client=True) as client:
        (generation,) = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=["plain-generation"]),
                flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]),
            )
        )
    assert eventually(lambda: pixels_of_plots(f"{ui}/artifacts/artifact/{generation.id}", tmp_path) > 500)


def test_an_exhausted_budget_refuses_before_data_are_read(
    prefect_server: Served, first_runs: dict[str, list[FlowRun]]
) -> None:
    assert named(first_runs["private"][0]) == "Completed"
    # Were they read, that would be what the run ends with.
    for file in prefect_server.data("private").iterdir():
        file.write_bytes(b"no table")
    refused = finished(start("private", privacy={"clipping_norm": 2}))
    assert refused.state is not None
    assert refused.state.name == "BudgetExhausted"
    assert refused.state.is_failed()
    assert "privacy.budget_epsilon: this release would bring" in (refused.state.message or "")
    assert len(records(prefect_server, "private")) == 1


def test_notify_starts_a_run_and_changed_data_recompute_from_the_target_on(
    prefect_server: Served, first_runs: dict[str, list[FlowRun]]
) -> None:
    assert "Completed" in map(named, first_runs["plain"])
    train = prefect_server.data("plain") / "train.parquet"
    rows = pd.read_parquet(train)
    rows.loc[0, "text"] = "a new and better text"
    rows.to_parquet(train)
    before = set(runs_of("plain"))
    assert "gradmm/plain starts" in command(prefect_server, "gradmm.deployments.cli.main", "notify", "plain")
    wait_for(lambda: set(runs_of("plain")) - before)
    (run,) = [run for id, run in runs_of("plain").items() if id not in before]
    assert named(run) == "Completed"
    changed = records(prefect_server, "plain")[-1]
    assert ran(changed)[0] == changed.stages[0].stage == "target_gradient"
    assert "generation" in ran(changed)


def test_an_override_leaves_the_rest_of_its_block_alone(
    prefect_server: Served, first_runs: dict[str, list[FlowRun]]
) -> None:
    assert "Completed" in map(named, first_runs["plain"])
    before = set(runs_of("plain"))
    command(prefect_server, "prefect", "deployment", "run", "gradmm/plain", "-p", 'generation={"per_class": 6}')
    (run,) = [run for id, run in runs_of("plain").items() if id not in before]
    assert named(run) == "Completed"
    first, *_, overridden = records(prefect_server, "plain")
    generation = first.recipe.generation.model_copy(update={"per_class": 6})
    assert overridden.recipe == first.recipe.model_copy(update={"generation": generation})
    assert overridden.stage("generation").rows == 12


def processes_of(run: FlowRun) -> list[int]:
    def environment(folder: Path) -> bytes:
        try:
            return (folder / "environ").read_bytes()
        except OSError:  # ended, or not ours
            return b""

    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if f"PREFECT__FLOW_RUN_ID={run.id}".encode() in environment(folder)
    ]


def test_there_is_one_automation_that_crashes_dead_runs(prefect_server: Served) -> None:
    with get_client(sync_client=True) as client:
        (before,) = client.read_automations_by_name(CRASH_AUTOMATION)
    keep_crash_automation()
    with get_client(sync_client=True) as client:
        (after,) = client.read_automations_by_name(CRASH_AUTOMATION)
    assert after.id == before.id
    assert after.enabled


@pytest.mark.nightly
def test_deploying_to_a_work_pool_gives_the_same_parameters(prefect_server: Served) -> None:
    command(prefect_server, "prefect", "work-pool", "create", "gradmm", "--type", "process")
    served = deployed_parameters("demo")
    file = "deployments/prefect.yaml"
    said = command(prefect_server, "prefect", "--no-prompt", "deploy", "--prefect-file", file, "--all")
    recipes = yaml.safe_load(Path(file).read_text())["deployments"]
    assert len(re.findall("successfully created", said)) == len(recipes)
    assert deployed_parameters("demo") == served | {"root": str(Path("gradmm-root").resolve())}
    with get_client(sync_client=True) as client:
        assert client.read_deployment_by_name("gradmm/demo").work_pool_name == "gradmm"


def deployed_parameters(recipe: str) -> dict:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(f"gradmm/{recipe}").parameters
