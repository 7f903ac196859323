"""The folder of one run: its record, its private report and its release folder."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TypeVar

from gradmm.metrics.resemblance import Resemblance
from gradmm.outputs.comparison import newest_comparison
from gradmm.outputs.record import RunRecord
from gradmm.outputs.release import write_release
from gradmm.outputs.report import ReportRows, write_report
from gradmm.storage.artifacts import Root, StageArtifact, publish
from gradmm.storage.location import Location, create

Record = TypeVar("Record", bound=RunRecord)


def write_run(
    root: Root,
    record: RunRecord,
    texts: StageArtifact,
    evaluation: StageArtifact,
    audit: StageArtifact,
    compared: Resemblance,
) -> RunRecord:
    """Write release/, report.html and run.json to `<root>/runs/<run id>/`. A folder with a run.json is complete.

    Args:
        texts: the output of the stage `labelling`.
        compared: the texts and as many real ones, for the private report only.

    Returns:
        The record. Its run id differs if a run of the same second has taken the original one.
    """
    folder, record = new_folder(root, record)
    labelled = texts.read()
    generated = record.stage("generation").read(["loss_history"])
    write_release(folder / "release", record, labelled)
    rows = ReportRows(generated, labelled, evaluation.read(), audit.read(), compared)
    write_report(folder / "report.html", record, rows, newest_comparison(root, record))
    publish(folder / "run.json", record.model_dump_json(indent=2).encode())
    return record


def new_folder(root: Root, record: Record) -> tuple[Location, Record]:
    """Create a folder for this run alone. Return it and the record with the folder's run id."""
    for attempt in range(1, 1000):
        run_id = record.run_id if attempt == 1 else f"{record.run_id}-{attempt}"
        try:
            _create_folder(root.runs / run_id)
        except FileExistsError:
            continue
        return root.runs / run_id, record.model_copy(update={"run_id": run_id})
    raise FileExistsError(root.runs / record.run_id)


def _create_folder(folder: Location) -> None:
    """Create a folder.

    Raises:
        FileExistsError: if another run has created it.
    """
    if isinstance(folder, Path):
        folder.parent.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
    else:  # an object store has no folders: an object marks the prefix as taken
        create(folder / "taken", secrets.token_hex(8).encode())
