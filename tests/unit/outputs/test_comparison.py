"""The comparison that a report shows: the newest of the same data, model and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gradmm.outputs.comparison import STUDY, Comparison, newest_comparison
from gradmm.outputs.record import RunRecord
from gradmm.storage.artifacts import Root
from gradmm.storage.location import Location
from gradmm.storage.schemas import SCHEMAS
from tests.unit.outputs.test_release import SENTIMENT, run_record


@pytest.fixture
def run() -> RunRecord:
    return run_record(SENTIMENT, rows=20)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(path=tmp_path)
    root.prepare()
    return root


def table(accuracy: float) -> pd.DataFrame:
    arms = pd.DataFrame(
        {
            "arm": ["before", "random", "gradmm", "all rows"],
            "size": [0, 20, 20, 1200],
            "seeds": [1, 3, 3, 3],
            "accuracy": [0.6, None, accuracy, 0.9],
            "accuracy_half_width": [None, None, 0.0123, 0.01],
            "gap_recovered": [0.0, None, 0.5, 1.0],
        }
    )
    return arms.reindex(columns=SCHEMAS[STUDY].names)


def write(
    root: Root, run: RunRecord, time: str, accuracy: float, study: str = STUDY, **changes: Mapping[str, Any]
) -> Location:
    """Write a study's table and record; `changes` are of blocks of the recipe, or of `data` and `model`."""
    artifact = root.write_stage(STUDY, f"{len(list(root.runs.glob('*'))):032x}", table(accuracy), {}, {})
    stage = artifact.model_dump(mode="json") | {"cached": False, "seconds": 1.0}
    record = run.model_dump(mode="json") | {"run_id": f"{time}-reviews-{study}", "study": study, "stages": [stage]}
    for name, change in changes.items():
        holder = record if name in ("data", "model") else record["recipe"]
        holder[name] = holder[name] | change
    folder = root.runs / record["run_id"]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def accuracy_of(found: Comparison | None) -> str | None:
    return found and found.rows[2][2]


def test_the_newest_is_found(root: Root, run: RunRecord) -> None:
    assert newest_comparison(root, run) is None
    write(root, run, "20260102T000000Z", 0.75)
    write(root, run, "20260103T000000Z", 0.76)
    write(root, run, "20260101T000000Z", 0.74)
    found = newest_comparison(root, run)
    assert found is not None
    assert found.run_id == "20260103T000000Z-reviews-compare"
    assert found.rows == [
        ("before", "–", "60.0%", "0%", "1"),
        ("random", "20", "–", "–", "3"),
        ("gradmm", "20", "76.0 ± 1.2%", "50%", "3"),
        ("all rows", "1,200", "90.0 ± 1.0%", "100%", "3"),
    ]


def test_only_evaluations_may_differ(root: Root, run: RunRecord) -> None:
    write(root, run, "20260101T000000Z", 0.74, finetune_eval={"steps": [7]}, execution={"workers": 9})
    for block, change in {
        "privacy": {"epsilon": 7.0},
        "generation": {"per_class": 7},
        "labelling": {"labels": "hard"},
        "data": {"sha256": "other"},
        "model": {"sha256": "other"},
    }.items():
        write(root, run, f"20260102T00000{len(block)}Z", 0.75, **{block: change})
    write(root, run, "20260104T000000Z", 0.76, study="scarce")
    plain = root.runs / "20260105T000000Z-my-compare"
    plain.mkdir()
    (plain / "run.json").write_text(run.model_dump_json())
    assert accuracy_of(newest_comparison(root, run)) == "74.0 ± 1.2%"


def test_damaged_ones_are_passed_over(root: Root, run: RunRecord) -> None:
    write(root, run, "20260101T000000Z", 0.74)
    (write(root, run, "20260102T000000Z", 0.75) / "run.json").write_text("{")
    lost = write(root, run, "20260103T000000Z", 0.76)
    Path(json.loads((lost / "run.json").read_text())["stages"][0]["path"]).write_bytes(b"changed")
    replaced = write(root, run, "20260104T000000Z", 0.77)
    (stage,) = json.loads((replaced / "run.json").read_text())["stages"]
    root.write_stage(STUDY, Path(stage["path"]).stem, table(0.78), {}, {})
    assert accuracy_of(newest_comparison(root, run)) == "74.0 ± 1.2%"


def test_it_is_found_where_the_root_was_moved(root: Root, run: RunRecord, tmp_path: Path) -> None:
    write(root, run, "20260101T000000Z", 0.74)
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert accuracy_of(newest_comparison(Root(path=moved), run)) == "74.0 ± 1.2%"
