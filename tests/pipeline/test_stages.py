"""A stage whose code changes has to raise its version, or old results would be taken for new ones."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from pathlib import Path

import pytest

from tasks.stages import STAGES

PROJECT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("stage_digests.json")
UPDATE = "GRADMM_ACCEPT_STAGE_DIGESTS"


def parsed(module: str, project: Path = PROJECT) -> ast.Module:
    return ast.parse((project / module.replace(".", "/")).with_suffix(".py").read_text())


def code_digest(modules: tuple[str, ...], project: Path = PROJECT) -> str:
    """Of what the modules do: comments, docstrings and layout do not count."""
    digest = hashlib.sha256()
    for module in sorted(modules):
        tree = parsed(module, project)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                and ast.get_docstring(node) is not None
            ):
                node.body = node.body[1:] or [ast.Pass()]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def current() -> dict[str, dict[str, object]]:
    return {name: {"version": s.version, "digest": code_digest(s.modules)} for name, s in STAGES.items()}


@pytest.mark.skipif(UPDATE in os.environ, reason="accepting the code as it is")
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_whose_code_changed_has_a_new_version(stage: str) -> None:
    accepted, now = json.loads(RECORD.read_text())[stage], current()[stage]
    if now == accepted:
        return
    assert now["version"] != accepted["version"], (
        f"code behind {stage} changed: raise its version in gradmm_core/stages.py if its results change, "
        f"then accept with {UPDATE}=1 pytest {Path(__file__).name}"
    )
    pytest.fail(f"{stage} has a new version: accept it with {UPDATE}=1 pytest {Path(__file__).name}")


@pytest.mark.skipif(UPDATE not in os.environ, reason=f"only with {UPDATE}=1")
def test_accept_stage_digests() -> None:
    RECORD.write_text(json.dumps(current(), indent=2) + "\n")


def test_the_digest_sees_code_but_not_comments(tmp_path: Path) -> None:
    digests = []
    for source in ("x = 1\n", '"""Doc."""\n# why\nx  =  1\n', "x = 2\n"):
        (tmp_path / "m.py").write_text(source)
        digests.append(code_digest(("m",), tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_every_module_that_a_stage_imports_counts_for_it() -> None:
    """Directly imported modules are listed, or are known to decide no result."""
    plumbing = {
        f"gradmm_core.{name}"
        for name in ("errors", "settings", "artifacts", "location", "recipe", "demo", "ledger")
    }
    for name, stage in STAGES.items():
        for module in stage.modules:
            imported = {
                node.module
                for node in ast.walk(parsed(module))
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("gradmm_core", "tasks"))
            }
            missing = imported - plumbing - {"tasks.stage", "tasks.inputs"} - set(stage.modules)
            assert not missing, f"{name}: {module} imports {missing}, which is not listed"
