"""Heavy libraries are imported where they are used, so that small commands start at once.

That also leaves time to set how torch's threads wait, which has to happen before torch is imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Of models and statistics: a run whose stages are all cached computes nothing.
OF_COMPUTING = {"torch", "transformers", "tokenizers", "sklearn", "matplotlib", "datasets"}
HEAVY = OF_COMPUTING | {"prefect", "pandas", "pyarrow", "scipy", "numpy", "dp_accounting"}


def imported(code: str) -> set[str]:
    """Top-level packages that a fresh process has imported after some code."""
    listing = f"import sys\n{code}\nprint('|', *{{name.partition('.')[0] for name in sys.modules}})"
    finished = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(finished.stdout.rpartition("|")[2].split())


@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "--show", "demo"], ["runs", "--root", "ROOT"]])
def test_small_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    words = [str(tmp_path) if word == "ROOT" else word for word in arguments]
    found = imported(f"from gradmm.deployments.cli.main import main\nassert main({words!r}) == 0")
    assert "yaml" in found or "pydantic" in found  # what it did import is seen
    assert not found & HEAVY


def test_the_flow_and_its_table_import_nothing_that_only_stages_compute_with() -> None:
    found = imported("import gradmm.flows.distil, gradmm.deployments.cli.summary")
    assert "prefect" in found
    assert not found & OF_COMPUTING


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_soon_unless_the_user_chose_how_they_wait(
    chosen: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os, sys; from gradmm.deployments.cli.main import main; assert main(['recipes']) == 0; "
        "assert 'torch' not in sys.modules; print('|', os.environ.get('GOMP_SPINCOUNT'))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.rpartition("|")[2].strip() == str(spins)
