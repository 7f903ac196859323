"""The notebook in docs/guide runs, and is kept without outputs.

Its cells are executed in a plain namespace, one after the other: they use nothing of Jupyter, and a kernel would
add some 25 packages to those that are pinned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradmm.demo.material import build_demo

NOTEBOOK = Path(__file__).parents[2] / "docs" / "guide" / "stages.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs(cells: list[dict[str, Any]]) -> None:
    assert len(cells) >= 7
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_its_cells_run(
    cells: list[dict[str, Any]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached = request.config.pluginmanager.has_plugin("cacheprovider")
    demo = request.config.cache.mkdir("demo") if cached else tmp_path / "demo"
    build_demo(demo)
    (tmp_path / "gradmm-root").mkdir()
    (tmp_path / "gradmm-root" / "demo").symlink_to(demo)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert [names["exact"].guarantee.epsilon, names["private"].guarantee.epsilon] == [None, 1]
    assert "above the budget of 1" in names["refusal"]
    assert len(names["texts"]) == 20
    assert len(names["labelled"]) == names["filtered"]["kept"].sum() > 0
    assert len(names["found"].memorisation) == len(names["labelled"])  # the noise is drawn anew: any may be a copy
