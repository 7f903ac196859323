"""Two `gradmm serve` at one port: one has the server, and the other uses it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import prefect_home


@pytest.mark.slow
def test_the_second_says_whose_server_it_uses_and_ends_with_it(migrated_database: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "gradmm.deployments.cli.main", "serve", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= prefect_home(tmp_path / "home", migrated_database)
    with ExitStack() as stack:

        def served(name: str, recipe: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [*words, recipe, "--root", tmp_path / name],
                    env=environment,
                    stdout=stack.enter_context((tmp_path / f"{name}.log").open("w")),
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(process.kill)
            deadline = time.monotonic() + 200
            while f"Serving gradmm/{recipe}" not in said(name):
                assert process.poll() is None, said(name)
                assert time.monotonic() < deadline
                time.sleep(0.1)
            return process

        def said(name: str) -> str:
            return (tmp_path / f"{name}.log").read_text()

        first, second = served("first", "demo"), served("second", "sst2")
        third = subprocess.run(
            [*words, "demo", "--root", tmp_path / "third"], env=environment, text=True, capture_output=True
        )
        assert third.returncode == 2
        assert f"gradmm/demo is served already, with the root {tmp_path / 'first'}" in third.stderr
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0, said("first")
        assert second.wait(60) == 2, said("second")
    assert "This server was running already" not in said("first")
    _, greeting, *_, last = said("second").splitlines()
    assert greeting == "This server was running already: when it stops, so does this command."
    assert last.startswith(
        f"gradmm: http://127.0.0.1:{port}/api: the Prefect server stopped answering; serve again"
    )
    assert "Traceback" not in said("second")
