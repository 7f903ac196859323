from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gradmm

CORE = Path(__file__).parents[2] / "gradmm_core"
PACKAGES = sorted(folder.name for folder in CORE.iterdir() if (folder / "__init__.py").is_file())


@pytest.mark.parametrize("name", gradmm.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(gradmm, name).__name__ == name
    assert name in dir(gradmm)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'distill'"):
        _ = gradmm.distill  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_the_package_imports_no_library() -> None:
    code = "import sys; before = set(sys.modules); import gradmm; print(*(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pandas", "pydantic", "prefect"} & set(ran.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_what_lives_there_and_names_its_modules(package: str) -> None:
    document = import_module(f"gradmm.{package}").__doc__ or ""
    modules = {file.stem for file in (CORE / package).glob("*.py")} - {"__init__"}
    assert document.strip()
    assert not {module for module in modules if module not in document}
    assert package in (gradmm.__doc__ or "")


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module would hide it."""
    modules = {path.stem for path in CORE.iterdir()} | {"tasks", "flows", "deployments"}
    assert set(gradmm.__all__) & modules == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_text_of_the_core_names_the_command_line(package: str) -> None:
    """Its errors are read by callers of the Python interface, and in Prefect's UI, too."""
    files = [file for file in (CORE / package).rglob("*.py") if (package, file.stem) != ("studies", "record")]
    texts = {
        (file.name, node.value)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not {text for text in texts if re.search(r"(^|[\s`'(])--[a-z]|\s--$", text[1]) or "`gradmm " in text[1]}
