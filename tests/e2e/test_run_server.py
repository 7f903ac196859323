"""The Prefect server that `gradmm run` starts for itself where none is configured."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

from gradmm.deployments.serving.prefect_server import server_of_one_run
from gradmm.lm.model_reference import ModelReference
from tests.flows.conftest import tiny_recipe_values


def test_none_is_started_where_one_is_configured_or_none_is_wanted() -> None:
    assert PREFECT_API_URL.value()
    with server_of_one_run() as server:
        assert server is None
    without = temporary_settings({PREFECT_API_URL: None, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False})
    with without, server_of_one_run() as server:
        assert server is None


@pytest.mark.slow
def test_a_run_has_one_server_that_keeps_its_records_and_ends_with_it(
    tiny_data: Path, tiny_model: ModelReference, tmp_path: Path
) -> None:
    recipe, home = tmp_path / "tiny.yaml", tmp_path / "home"
    recipe.write_text(yaml.safe_dump(tiny_recipe_values(tiny_data, tiny_model)))
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with subprocess.Popen(
        [sys.executable, "-m", "gradmm.deployments.cli.main", "run", recipe, "--root", tmp_path / "root"],
        env=environment | {"PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        children: dict[int, psutil.Process] = {}
        while run.poll() is None:
            children |= {child.pid: child for child in _servers(run.pid)}
            try:
                out, err = run.communicate(timeout=0.3)
            except subprocess.TimeoutExpired:
                continue
    assert run.returncode == 0, err
    assert "dataset:" in out
    assert len(children) == 1
    assert not any(child.is_running() for child in children.values())
    with sqlite3.connect(home / "prefect.db") as database:
        assert database.execute("select name, state_type from flow_run").fetchall()[0][1] == "COMPLETED"
        states = database.execute("select state_type from task_run").fetchall()
        (logs,) = database.execute("select count(*) from log where message like '%memorisation: %'").fetchone()
    database.close()
    assert len(states) >= 10
    assert set(states) == {("COMPLETED",)}
    assert logs == 1  # the last stage's line too


def _servers(pid: int) -> list[psutil.Process]:
    """Children of a process that are Prefect servers."""
    found = []
    try:
        for child in psutil.Process(pid).children(recursive=True):
            words = child.cmdline()
            if "uvicorn" in words or words[-1:] == ["--no-ui"]:
                found.append(child)
    except psutil.NoSuchProcess:
        pass
    return found
