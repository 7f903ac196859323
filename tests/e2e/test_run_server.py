"""The processes that `gradmm run` starts: its Prefect server where none is configured, and workers."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

from gradmm.config.loading import load_recipe
from gradmm.deployments.recipe_files import find_recipe
from gradmm.deployments.serving.local_run import configure_prefect
from gradmm.deployments.serving.notify import notify
from gradmm.deployments.serving.prefect_server import Server, server_of_one_run
from gradmm.deployments.serving.serve import DEAD_AFTER_SECONDS, recipes_to_serve
from gradmm.errors import InputError
from gradmm.flows.runtime.stopping import STOPPED, stopped_by_signals
from gradmm.lm.model_reference import ModelReference
from tests.conftest import prefect_home
from tests.flows.conftest import tiny_recipe_values

GRADMM = [sys.executable, "-m", "gradmm.deployments.cli.main"]


def _without_a_server() -> dict[str, str]:
    """The environment of commands that start their own, with all its services."""
    session = ("PREFECT_API_URL", "PREFECT_SERVER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(session)}
    return environment | {"OMP_NUM_THREADS": "1"}


def test_none_is_started_where_one_is_configured_or_none_is_wanted() -> None:
    assert PREFECT_API_URL.value()
    with server_of_one_run() as server:
        assert server is None
    without = temporary_settings({PREFECT_API_URL: None, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False})
    with without, server_of_one_run() as server:
        assert server is None


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


@pytest.mark.parametrize("api", ["http://127.0.0.1:9/api", "http://127.0.0.1:abc/api", "refusing"])
def test_a_server_that_does_not_answer_or_refuses_is_told_before_the_run(
    api: str, request: pytest.FixtureRequest
) -> None:
    api = request.getfixturevalue(api) if api == "refusing" else api
    said = "not an address" if "abc" in api else "no Prefect server answers"
    with (
        temporary_settings({PREFECT_API_URL: api}),
        pytest.raises(InputError, match=rf"{re.escape(api)}: {said} \("),
        server_of_one_run(),
    ):
        pytest.fail("it ran")


def test_the_reason_of_a_server_that_does_not_start_is_no_footnote() -> None:
    said = (
        "sqlite3.OperationalError: database or disk is full\n[SQL: INSERT]\n(Background on this error at: ...)\n\n"
    )
    server = Server("http://127.0.0.1:9/api", output=io.BytesIO(said.encode()))
    assert server._last_words() == "sqlite3.OperationalError: database or disk is full"


def test_a_wait_for_the_server_ends_by_ctrl_c_that_an_import_has_lost() -> None:
    with stopped_by_signals():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            Server("http://127.0.0.1:9/api").wait()


def test_runs_have_a_heartbeat_before_the_automation_takes_them_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", raising=False)
    configure_prefect(verbose=False)
    assert int(os.environ["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= DEAD_AFTER_SECONDS / 3


def test_recipes_of_one_name_and_paths_in_the_place_of_a_name_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe(find_recipe("demo"))
    with pytest.raises(InputError, match="another recipe is named 'demo'"):
        recipes_to_serve(["a.yaml", "b.yaml"], None, lambda _: recipe)
    with pytest.raises(InputError, match="not the name of a recipe"):
        notify("some/a.yaml")


@pytest.mark.slow
def test_a_run_has_one_server_that_keeps_its_records_and_ends_with_it(
    tiny_data: Path, tiny_model: ModelReference, migrated_database: Path, tmp_path: Path
) -> None:
    recipe, home = tmp_path / "tiny.yaml", tmp_path / "home"
    recipe.write_text(yaml.safe_dump(tiny_recipe_values(tiny_data, tiny_model)))
    with subprocess.Popen(
        [*GRADMM, "run", recipe, "--root", tmp_path / "root"],
        env=_without_a_server() | prefect_home(home, migrated_database),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        children: dict[int, psutil.Process] = {}
        while True:  # not until poll() tells of its end: communicate would not have returned all output
            children |= {child.pid: child for child in _servers(run.pid)}
            try:
                out, err = run.communicate(timeout=0.3)
                break
            except subprocess.TimeoutExpired:
                continue
    assert run.returncode == 0, err
    assert "dataset:" in out
    assert len(children) == 1
    assert not any(child.is_running() for child in children.values())
    with sqlite3.connect(home / "prefect.db") as database:
        assert database.execute("select name, state_type from flow_run").fetchall()[0][1] == "COMPLETED"
        tasks = database.execute("select id, task_key, state_type, task_inputs from task_run").fetchall()
        (logs,) = database.execute("select count(*) from log where message like '%memorisation: %'").fetchone()
    database.close()
    assert len(tasks) >= 10
    assert {state for _, _, state, _ in tasks} == {"COMPLETED"}
    assert logs == 1  # the last stage's line too
    # The graph has the edges between stages, and none from what every stage gets.
    edges = {
        (source.split("-")[0], target.split("-")[0])
        for number, source, _, _ in tasks
        for _, target, _, inputs in tasks
        if str(UUID(number)) in inputs
    }
    assert {("generation_shard", "generation"), ("generation", "label_filter")} <= edges
    assert not {source for source, _ in edges} & {"dataset_fingerprint", "model_fingerprint", "demo_material"}


@pytest.mark.slow
@pytest.mark.nightly
def test_servers_that_start_together_on_a_new_machine_share_its_database(tmp_path: Path) -> None:
    """Each would set it up, and all but one would fail."""
    with ExitStack() as stack:
        servers: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                api = f"http://127.0.0.1:{free.getsockname()[1]}/api"
            output = stack.enter_context((tmp_path / f"{number}.log").open("w"))
            words = ["--no-ui", "--host", "127.0.0.1", "--port", str(urlsplit(api).port)]
            servers[api] = subprocess.Popen(
                [sys.executable, "-m", "gradmm.deployments.serving.server_process", *words],
                env=_without_a_server() | {"PREFECT_HOME": str(tmp_path / "home")},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.enter_context(servers[api])  # waits for its end
            stack.callback(servers[api].terminate)
        deadline = time.monotonic() + 200
        while not all(Server(api).answers for api in servers):
            assert time.monotonic() < deadline
            assert [process.poll() for process in servers.values()] == [None, None]
            time.sleep(0.5)


@dataclass
class RunInTerminal:
    """A run of slow shards in the foreground of a terminal of its own."""

    process: subprocess.Popen[bytes]
    terminal: int
    root: Path
    said: str = ""
    children: dict[int, psutil.Process] = field(default_factory=dict)

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def wait_until(self, happened: Callable[[], object], seconds: float = 200) -> None:
        """Read what it says, and note its children, until it happens."""
        deadline = time.monotonic() + seconds
        done = False
        while not done:
            assert time.monotonic() < deadline, self.said
            done = bool(happened())
            assert done or not self.ended(), self.said
            with suppress(psutil.NoSuchProcess):
                of_run = psutil.Process(self.process.pid).children(recursive=True)
                self.children |= {child.pid: child for child in of_run}
            while select.select([self.terminal], [], [], 0.1)[0]:
                with suppress(OSError):  # nobody is left to say anything
                    self.said += os.read(self.terminal, 10_000).decode()
                    continue
                break

    def started_server(self) -> bool:
        return bool(_servers(self.process.pid))

    def finished_a_shard(self) -> bool:
        return any(self.root.glob("results/generation_shard/*"))

    def ended(self) -> bool:
        return self.process.poll() is not None


@pytest.fixture
def terminal_run(
    request: pytest.FixtureRequest,
    tiny_data: Path,
    tiny_model: ModelReference,
    migrated_database: Path,
    tmp_path: Path,
) -> Iterator[RunInTerminal]:
    """A run by the runner of the test's parameter."""
    execution = {"runner": request.param} | ({"workers": 2} if request.param == "processes" else {})
    values = tiny_recipe_values(tiny_data, tiny_model) | {"execution": execution}
    values["generation"] |= {"shard_size": 1, "search": {"draws": 6000, "rounds": 1}}
    recipe, root = tmp_path / "slow.yaml", tmp_path / "root"
    recipe.write_text(yaml.safe_dump(values))
    terminal, end = os.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *GRADMM, "run", recipe, "--root", root, "--quiet"],
        env=_without_a_server() | prefect_home(tmp_path / "home", migrated_database),
        stdin=end,
        stdout=end,
        stderr=end,
    ) as process:
        os.close(end)
        run = RunInTerminal(process, terminal, root)
        try:
            yield run
        finally:
            process.kill()
            for child in run.children.values():
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            os.close(terminal)


IN_PROCESS = pytest.mark.parametrize("terminal_run", ["in-process"], indirect=True)
IN_PROCESSES = pytest.mark.parametrize(
    "terminal_run", ["in-process", pytest.param("processes", marks=pytest.mark.nightly)], indirect=True
)


@pytest.mark.slow
@IN_PROCESS
def test_ctrl_c_while_the_server_starts_ends_the_run_at_once(terminal_run: RunInTerminal) -> None:
    terminal_run.wait_until(terminal_run.started_server)
    _stops(terminal_run, "\x03")


@pytest.mark.slow
@IN_PROCESSES
def test_ctrl_c_in_generation_ends_the_run_at_once(terminal_run: RunInTerminal) -> None:
    terminal_run.wait_until(terminal_run.finished_a_shard)
    _stops(terminal_run, "\x03")


@pytest.mark.nightly
@IN_PROCESS
def test_a_second_ctrl_c_leaves_nothing_either(terminal_run: RunInTerminal) -> None:
    terminal_run.wait_until(terminal_run.finished_a_shard)
    _stops(terminal_run, "\x03", "\x03")


def _stops(run: RunInTerminal, *keys: str) -> None:
    """The terminal sends the keys' signals to all processes in its foreground, the run's children too."""
    for key in keys:
        run.type(key)
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.2)
    run.wait_until(run.ended, 20)
    assert run.process.returncode == 130, run.said
    assert run.said.replace("^C", "").split("\r\n") == [STOPPED, ""]
    _leaves_nothing(run)


@pytest.mark.slow
@IN_PROCESSES
def test_a_killed_run_leaves_no_process_behind(terminal_run: RunInTerminal) -> None:
    terminal_run.wait_until(terminal_run.finished_a_shard)
    assert terminal_run.children
    terminal_run.process.kill()
    _leaves_nothing(terminal_run)


def _leaves_nothing(run: RunInTerminal) -> None:
    """Nobody may collect the ends of orphans, which are zombies then."""
    deadline = time.monotonic() + 30
    while alive := [child for child in run.children.values() if _is_alive(child)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _servers(pid: int) -> list[psutil.Process]:
    """Children of a process that are Prefect servers.

    A process that a server has forked shows the server's command line until it calls exec, and is not counted.
    """
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            words = child.cmdline()
            if ("uvicorn" in words or words[-1:] == ["--no-ui"]) and child.ppid() not in found:
                found[child.pid] = child
    return list(found.values())
