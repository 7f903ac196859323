"""What the documents name is there: tests that hold a statement, and the pages that figures are from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"

#: A file below tests/, or a test: of the file before the `::`, or of the last one that was named.
NAMED = re.compile(r"`(?:tests/)?(\w+/test_\w+\.py)?(?:::)?(test_\w+\*?)?`")


def named_tests(text: str) -> Iterator[tuple[str, str]]:
    """Files, and patterns of tests there; a file alone has the pattern `*`."""
    file = ""
    for place, name in NAMED.findall(text):
        file = place or file
        if place or name:
            yield file, name or "*"


def functions_of(file: str) -> list[str]:
    tree = ast.parse((TESTS / file).read_text())
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize(("document", "least"), [("operations.md", 40), ("privacy.md", 25)])
def test_every_test_that_a_document_names_is_there(document: str, least: int) -> None:
    named = list(named_tests((DOCS / document).read_text()))
    assert len(named) >= least
    missing = [
        (file, name) for file, name in named if not any(fnmatchcase(test, name) for test in functions_of(file))
    ]
    assert missing == []


def test_names_are_found_in_each_way_of_writing_them() -> None:
    text = "`core/test_a.py` and `tests/core/test_b.py::test_c`, `::test_d`; `test_e_*`, not `test_f()` or `a.py`"
    assert list(named_tests(text)) == [
        ("core/test_a.py", "*"),
        ("core/test_b.py", "test_c"),
        ("core/test_b.py", "test_d"),
        ("core/test_b.py", "test_e_*"),
    ]


def figures_of(text: str) -> set[str]:
    """Those with an interval, without their sign, however lines are broken."""
    return {" ± ".join(found) for found in re.findall(r"(\d+\.\d+)\s±\s(\d+\.\d+)", text)}


def test_every_interval_in_the_results_is_on_a_page_that_a_command_wrote() -> None:
    pages = set().union(*(figures_of(page.read_text()) for page in (DOCS / "results").glob("*.md")))
    told = figures_of((DOCS / "results.md").read_text())
    assert len(told) >= 30
    assert told - pages == set()


def test_figures_are_found_across_lines_and_whatever_their_sign() -> None:
    assert figures_of("by +0.021 ± 0.012 (-0.5\n± 0.25), 3 ± 1, 0.7") == {"0.021 ± 0.012", "0.5 ± 0.25"}
