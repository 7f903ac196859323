"""A run of a deployment: where it may write, how it is tagged and logged, and that it ends with its server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradmm.config.recipe import Recipe
from gradmm.errors import BudgetExhausted, InputError
from gradmm.flows.distil import distil
from gradmm.flows.runtime import deployed
from gradmm.flows.runtime.deployed import SERVED_BY, check_root, shorten_refusals, tags
from gradmm.storage.location import location


@pytest.fixture
def in_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "8a1f0e3c-0000-0000-0000-000000000000")


@pytest.mark.usefixtures("in_deployment")
def test_a_relative_root_is_refused_before_anything_is_written(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradmm.flows.distil.over_deployment", dict)
    with pytest.raises(InputError, match="root: 'other-root' is relative to the run's working directory"):
        distil.fn(**tiny_recipe().model_dump(mode="json"), root=Path("other-root"))
    assert not list(tmp_path.iterdir())
    check_root(tmp_path / "root")
    check_root(location("s3://bucket/team"))


def test_outside_of_deployments_roots_may_be_relative() -> None:
    check_root(Path("gradmm-root"))


def test_tags_follow_the_runs_own_epsilon(
    tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, in_deployment: None
) -> None:
    recipe = tiny_recipe()
    private = recipe.model_copy(update={"privacy": recipe.privacy.model_copy(update={"epsilon": 1.0})})
    sent = []

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update_flow_run(self, run: str, tags: list[str]) -> None:
            sent.append((run, tags))

    monkeypatch.setattr(deployed, "get_client", lambda **_: Client())
    monkeypatch.setattr(deployed, "flow_run", type("Run", (), {"id": "r", "tags": ["team", "gradmm", "private"]}))
    deployed.tag_run(recipe)
    deployed.tag_run(private)
    assert sent == [("r", ["team", "gradmm", "no-guarantee"]), ("r", ["team", "gradmm", "private"])]
    assert tags(recipe) == ["gradmm", "no-guarantee"]


@pytest.mark.parametrize(("error", "traced"), [(BudgetExhausted("a", "b", "c"), False), (ValueError("x"), True)])
def test_a_refusal_is_logged_without_a_traceback(
    error: Exception, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shorten_refusals()
    for name in ("prefect.task_runs", "prefect.flow_runs", "prefect.engine"):
        log = logging.getLogger(name)
        with caplog.at_level(logging.ERROR, name):
            log.addHandler(caplog.handler)
            log.error("failed", exc_info=error)
            log.removeHandler(caplog.handler)
    assert [bool(record.exc_info) for record in caplog.records] == [traced] * len(caplog.records)
    assert len(caplog.records) >= 3


def test_a_run_ends_soon_after_a_killed_server() -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    code = (
        "from gradmm.flows.runtime.deployed import end_with_server; end_with_server(); print('on', flush=True)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", f"{code}import time; time.sleep(60)"],
        env=os.environ | {SERVED_BY: str(server.pid)},
        stdout=subprocess.PIPE,
    )
    with run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"on\n"
        time.sleep(0.5)
        assert run.poll() is None
        server.kill()
        server.wait()
        assert run.wait(timeout=30) == 1
