"""The folder of one run: its record, its private report, its release."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TypeVar

from gradmm_core.artifacts import Root, StageArtifact, publish
from gradmm_core.filters import kept_texts
from gradmm_core.location import Location, create
from gradmm_core.release import write_release
from gradmm_core.report import write_report
from gradmm_core.run_record import RunRecord

Record = TypeVar("Record", bound=RunRecord)


def write_run(
    root: Root, record: RunRecord, texts: StageArtifact, evaluation: StageArtifact, audit: StageArtifact
) -> RunRecord:
    """Writes `<root>/runs/<run id>/`: release/, report.html and, last, run.json: a folder with it is complete.

    Args:
        texts: of the last filter.

    Returns:
        The record, with another run id if a run of the same second has taken this one.
    """
    folder, record = new_folder(root, record)
    kept = kept_texts(texts.read())
    generated = record.stage("generation").read(["loss_history"])
    write_release(folder / "release", record, kept)
    write_report(folder / "report.html", record, generated, kept, evaluation.read(), audit.read())
    publish(folder / "run.json", record.model_dump_json(indent=2).encode())
    return record


def new_folder(root: Root, record: Record) -> tuple[Location, Record]:
    """Makes the folder of a run, which is taken by nobody else."""
    for attempt in range(1, 1000):
        run_id = record.run_id if attempt == 1 else f"{record.run_id}-{attempt}"
        try:
            _take(root.runs / run_id)
        except FileExistsError:
            continue
        return root.runs / run_id, record.model_copy(update={"run_id": run_id})
    raise FileExistsError(root.runs / record.run_id)


def _take(folder: Location) -> None:
    """Makes a folder for this run alone.

    Raises:
        FileExistsError: if another run has it.
    """
    if isinstance(folder, Path):
        folder.parent.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
    else:  # an object store has no folders: an object says that this one is taken
        create(folder / "taken", secrets.token_hex(8).encode())
