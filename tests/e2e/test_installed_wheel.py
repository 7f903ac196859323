"""The wheel in its own environment, used from a folder with other people's `flows`, `tasks` and `deployments`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from gradmm.lm.model_reference import ModelReference
from tests.flows.conftest import tiny_data as tiny_data
from tests.flows.conftest import tiny_recipe_values

PROJECT = Path(__file__).resolve().parents[2]
OTHER_PEOPLES = ("flows", "tasks", "deployments", "tests", "benchmarks")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves build/ and an egg-info beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("gradmm_core", "tasks", "flows", "deployments"):
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheel; libraries come from this one, without its editable install."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def folder(tmp_path: Path, tiny_data: Path, tiny_model: ModelReference) -> Path:
    """A stranger's project, in which a recipe lies."""
    for name in OTHER_PEOPLES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not of gradmm')\n")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_recipe_values(tiny_data, tiny_model)))
    return tmp_path


def test_the_wheel_has_one_package_and_all_that_a_user_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"gradmm"}
    shipped = {str(p.relative_to(PROJECT / "deployments")) for p in (PROJECT / "deployments").rglob("*.yaml")}
    assert {f"gradmm/deployments/{name}" for name in shipped} <= set(names)
    assert "gradmm/outputs/templates/report.html.jinja" in names
    modules = [
        f for top in ("gradmm_core", "tasks", "flows", "deployments") for f in (PROJECT / top).rglob("*.py")
    ]
    assert len([name for name in names if name.endswith(".py")]) == len(modules)


def variables(folder: Path, **more: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "PYTHON"))}
    return (
        inherited | {"PREFECT_HOME": str(folder / "prefect"), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"} | more
    )


def test_nothing_of_gradmm_is_importable_under_a_common_name(environment: Path, tmp_path: Path) -> None:
    listing = f"import importlib.util as u; print([n for n in {OTHER_PEOPLES!r} if u.find_spec(n)])"
    command = [environment, "-c", f"import gradmm; {listing}"]
    found = subprocess.run(
        command, cwd=tmp_path, env=variables(tmp_path), capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_run_from_a_strangers_folder(environment: Path, folder: Path) -> None:
    command = [environment.parent / "gradmm", "run", "tiny.yaml", "--root", "root"]
    ran = subprocess.run(command, cwd=folder, env=variables(folder), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert list(folder.glob("root/runs/*/release/README.md"))


@pytest.fixture
def served(environment: Path, folder: Path) -> Iterator[str]:
    """The address of the server of `gradmm serve tiny.yaml`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [environment.parent / "gradmm", "serve", "tiny.yaml", "--root", "root", "--port", port]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=variables(folder), stdout=log, stderr=log)
    api = f"http://127.0.0.1:{port}/api"
    try:
        deadline = time.monotonic() + 240
        while not _is_served(api):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.5)
        yield api
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _is_served(api: str) -> bool:
    try:
        found = httpx.post(f"{api}/deployments/filter", json={}, timeout=5)
        return found.status_code == 200 and len(found.json()) == 1
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_a_served_deployment_completes_beside_other_peoples_packages(
    environment: Path, folder: Path, served: str
) -> None:
    command = [environment, "-m", "prefect", "deployment", "run", "gradmm/tiny", "--watch"]
    told = variables(folder, PREFECT_API_URL=served)
    ran = subprocess.run(command, cwd=folder / "prefect", env=told, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr + (folder / "log").read_text()
    assert "Completed" in ran.stdout
    assert list(folder.glob("root/runs/*/release/README.md"))
