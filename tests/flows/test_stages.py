"""A stage whose code changes has to raise its version, or old results would be taken for new ones."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from functools import cache
from pathlib import Path

import pytest

import gradmm
from gradmm.tasks.runtime.registry import STAGE_VERSIONS, STUDY_STAGES

RECORD = Path(__file__).with_name("stage_digests.json")
UPDATE = "GRADMM_ACCEPT_STAGE_DIGESTS"
PROJECT = Path(__file__).resolve().parents[2]
FOLDERS = {"tasks": "tasks", "flows": "flows", "deployments": "deployments"}

#: Modules whose changes change no stage's rows.
PLUMBING = (
    "gradmm.errors",
    "gradmm.config",
    "gradmm.storage",
    "gradmm.demo",
    "gradmm.privacy.ledger",
    "gradmm.privacy.ledger_store",
    "gradmm.tasks.runtime.stage_task",
    "gradmm.tasks.runtime.registry",
    "gradmm.tasks.runtime.inputs",
)


def source(module: str) -> Path | None:
    """The file of a dotted name below `gradmm`; None if it names a package or a definition."""
    _, first, *rest = module.split(".")
    folder = PROJECT / first if first in FOLDERS else PROJECT / "gradmm_core" / first
    file = folder.joinpath(*rest).with_suffix(".py")
    return file if file.is_file() else None


def imported(module: str) -> set[str]:
    """Modules of this project that a module imports, at its top or inside of functions."""
    file = source(module)
    assert file is not None, module
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradmm."):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if source(name)}


def is_plumbing(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in PLUMBING)


@cache
def closure(module: str) -> frozenset[str]:
    """A module and everything that it imports, directly or not, except for plumbing."""
    found, new = set(), {module}
    while new:
        found |= new
        new = {name for each in new for name in imported(each) if not is_plumbing(name)} - found
    return frozenset(found)


def task_module(stage: str) -> str:
    file = {"generation_shard": "generation", "arm_eval": "finetune_eval"}.get(stage, stage)
    if stage not in STUDY_STAGES:
        return f"gradmm.tasks.{file}"
    module = f"gradmm.tasks.studies.{file}"
    return module if source(module) else "gradmm.tasks.studies.tables"


def code_digest(files: list[Path]) -> str:
    """Digest the code of files: comments, docstrings, imports and layout do not count."""
    digest = hashlib.sha256()
    for file in sorted(files):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                node.body = [n for n in body if not isinstance(n, ast.Import | ast.ImportFrom)] or [ast.Pass()]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def current(stage: str) -> dict[str, object]:
    files = [source(module) for module in closure(task_module(stage))]
    return {"version": STAGE_VERSIONS[stage], "digest": code_digest([file for file in files if file])}


@pytest.mark.skipif(UPDATE in os.environ, reason="accepting the code as it is")
@pytest.mark.parametrize("stage", STAGE_VERSIONS)
def test_a_stage_whose_code_changed_has_a_new_version(stage: str) -> None:
    accepted, now = json.loads(RECORD.read_text())[stage], current(stage)
    if now == accepted:
        return
    assert now["version"] != accepted["version"], (
        f"code behind {stage} changed: raise its version in tasks/runtime/registry.py if its results change, "
        f"then accept with {UPDATE}=1 pytest {Path(__file__).name}"
    )
    pytest.fail(f"{stage} has a new version: accept it with {UPDATE}=1 pytest {Path(__file__).name}")


@pytest.mark.skipif(UPDATE not in os.environ, reason=f"only with {UPDATE}=1")
def test_accept_stage_digests() -> None:
    RECORD.write_text(json.dumps({stage: current(stage) for stage in STAGE_VERSIONS}, indent=2) + "\n")


def test_the_digest_sees_code_but_not_comments(tmp_path: Path) -> None:
    digests = []
    for text in ("x = 1\n", '"""Doc."""\n# why\nimport os\nx  =  1\n', "x = 2\n"):
        (tmp_path / "m.py").write_text(text)
        digests.append(code_digest([tmp_path / "m.py"]))
    assert digests[0] == digests[1] != digests[2]


def test_the_modules_behind_a_stage_are_found_through_imports() -> None:
    """Late imports inside of functions count, and so do indirect ones."""
    modules = closure(task_module("generation"))
    assert {"gradmm.generation.search", "gradmm.gradients.head_gradient", "gradmm.target.probe"} <= modules
    assert not any(map(is_plumbing, modules))
    assert Path(gradmm.__file__).parent == PROJECT / "gradmm_core"
