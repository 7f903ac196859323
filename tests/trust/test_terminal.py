"""What strangers wrote into recipes and records is text on a terminal: it is no markup, and steers nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradmm.deployments.cli.main import main
from tests.trust.network import refused, refusing_network

HOSTILE = "[/red][bold]x[/]\x1b[2J\x9b1m\u202eabc\x07"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> None:
    """Runs a command that shows the hostile text, spelt out."""
    assert main([str(argument) for argument in arguments]) == 0
    out = capsys.readouterr().out
    assert "".join(character for character in out if not character.isprintable()).strip("\n") == ""
    assert "u202e" in "".join(out.split())
    assert "[/red]" in out


def test_a_ledgers_name_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(f"""
name: tiny
data: {{path: .}}
model: {{name: .}}
label_filter: {{enabled: false}}
privacy: {{ledger: {json.dumps(HOSTILE)}}}
classes:
- {{label: 0, name: bad, verbaliser: " bad", instruction: a}}
- {{label: 1, name: good, verbaliser: " good", instruction: b}}
""")
    printed(capsys, "privacy", recipe, "--root", tmp_path / "root")


def test_the_record_of_a_run_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {
        "run_id": HOSTILE,
        "recipe": {"name": HOSTILE, HOSTILE: HOSTILE},
        "guarantee": {"epsilon": None},
        "data": {},
        "model": {},
        "started": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
        "versions": {HOSTILE: HOSTILE},
        "stages": [],
    }
    for name, record in {"one": run, "other": run | {"versions": {"a": HOSTILE}}}.items():
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    printed(capsys, "runs", "--root", tmp_path)
    printed(capsys, "diff", "one", "other", "--root", tmp_path)


@pytest.mark.slow
def test_who_works_at_a_terminal_is_not_reported_to_anyone(tmp_path: Path) -> None:
    """Prefect would tell its makers of a first import on a terminal, unless it has a server that forbids it."""
    environment = refusing_network(tmp_path / "attempts") | {"PREFECT_HOME": str(tmp_path / "home")}
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "gradmm.deployments.cli.main", "notify", "nothing"]
    subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=end, stdout=end, stderr=end, timeout=100, check=False
    )
    os.close(end)
    said = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert refused(tmp_path / "attempts") == {"": []}
    assert said.startswith("gradmm: "), said
    assert "socket.connect" in (tmp_path / "attempts").read_text()
