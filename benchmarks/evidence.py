"""Measure what docs/results reports: run the studies of evidence.yaml that have no data there yet, one by one.

    python -m benchmarks.evidence FOLDER --material ../shared/material [NAME ...] [--list]

FOLDER keeps roots, and a link to the material. A study that is interrupted goes on where it was when the same
command is given again. When one is complete, its table is docs/results/data/NAME.csv, and its command, commit,
machine and guarantees are an entry of runs.json beside it. Pages quote these files.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from gradmm.studies.record import StudyRecord

PLAN = Path(__file__).with_suffix(".yaml")
DATA = Path(__file__).parents[1] / "docs" / "results" / "data"
RUNS = DATA / "runs.json"


class Study(NamedTuple):
    """One command of the plan; `words` are those after `gradmm`."""

    name: str
    data: str
    words: list[str]


def planned() -> list[Study]:
    """Read the plan."""
    plan = yaml.safe_load(PLAN.read_text())
    return [_study(plan, **entry) for entry in plan["studies"]]


def _study(
    plan: dict[str, Any],
    name: str,
    study: str,
    data: str,
    arguments: str,
    settings: str,
) -> Study:
    changes = [*plan["data"][data]["settings"], *plan["model"], *plan[settings]]
    words = [word for change in changes for word in ("--set", change)]
    return Study(
        name,
        data,
        [study, plan["data"][data]["recipe"], "--root", f"roots/{data}", *words, *shlex.split(arguments)],
    )


def measure(study: Study, folder: Path) -> None:
    """Run a study in `folder`, and write its table and its description.

    Raises:
        subprocess.CalledProcessError: if the command fails.
    """
    command = [sys.executable, "-m", "gradmm.deployments.cli.main", *study.words, "--quiet"]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    run = folder / done.stdout.strip().splitlines()[-1]
    record = StudyRecord.model_validate_json((run / "run.json").read_bytes())
    in_results(record.table.read(), study).to_csv(DATA / f"{study.name}.csv", index=False)
    runs = json.loads(RUNS.read_text()) | {study.name: described(record)}
    RUNS.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")


def in_results(table: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Name and round the columns of a study's table as the other data of the results have them."""
    table = table.rename(columns=lambda name: re.sub("^difference", "lead", name).replace("_half_width", "_ci95"))
    for name in table.select_dtypes("float64"):
        form = "{:g}" if name == "learning_rate" else "{:.3f}"
        table[name] = table[name].map(lambda value, form=form: "" if pd.isna(value) else form.format(value))
    table.insert(0, "run", study.name)
    table.insert(1, "set", study.data)
    return table


def described(record: StudyRecord) -> dict[str, Any]:
    """How a study was made, as an entry of runs.json."""
    guarantees = {"gradmm": record.guarantee, **record.guarantees}
    return {
        "date": f"{record.started:%Y-%m-%d}",
        "command": shlex.join(record.command),
        "commit": record.commit,
        "machine": record.machine,
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        "guarantees": [f"{arm}: {guarantee.sentence}" for arm, guarantee in guarantees.items()],
        "model": f"{record.recipe.model.name}, {record.model['digest'][:12]}",
        "test_rows": min(record.data["test"]["rows"], record.recipe.finetune_eval.max_test_rows or sys.maxsize),
        "seconds": round(record.seconds),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="studies; default: all")
    parser.add_argument("--material", type=Path, required=True)
    parser.add_argument("--list", action="store_true", help="print what is missing, with its command")
    options = parser.parse_intermixed_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "material").exists():
        (options.folder / "material").symlink_to(options.material.resolve(), target_is_directory=True)
    measured = json.loads(RUNS.read_text())
    if unknown := sorted(set(options.names) - {study.name for study in planned()}):
        parser.error(f"no study {', '.join(unknown)} in {PLAN.name}")
    for missing in planned():
        if missing.name in measured or (options.names and missing.name not in options.names):
            continue
        print(f"{missing.name}: {shlex.join(['gradmm', *missing.words])}", flush=True)
        if not options.list:
            measure(missing, options.folder)
