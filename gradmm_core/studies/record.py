"""The record of a study and its folder: tables, pictures, and everything that they were made with."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from gradmm.outputs.folder import new_folder
from gradmm.outputs.record import RunRecord, StageRecord
from gradmm.privacy.guarantee import Guarantee
from gradmm.storage.artifacts import Root, publish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The page, in the run's folder.
TABLES = "tables.md"


class StudyRecord(RunRecord, frozen=True):
    """The run of a study.

    Attributes:
        study: name of the flow and of the stage with the study's table.
        command: the command line; empty if the flow was called from Python.
        commit: of the code; None without a git checkout.
        guarantee: of the recipe's own texts.
        guarantees: of every private arm, by the arm's name.
        making_seconds: the time of each stage that made the texts of an arm's first seed, by arm and stage, where
            it was not cached.
    """

    study: str
    command: tuple[str, ...]
    commit: str | None
    machine: str
    arms: tuple[str, ...]
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    guarantees: dict[str, Guarantee]
    making_seconds: dict[str, dict[str, float]] = Field(default_factory=dict)

    @property
    def table(self) -> StageRecord:
        """The stage with the study's table."""
        return self.stage(self.study)


def write_study(root: Root, record: StudyRecord, page: str, pictures: Mapping[str, Figure]) -> StudyRecord:
    """Write `<root>/runs/<run id>/`: tables.md, each picture as .svg and .png and, last, run.json.

    Returns:
        The record, with another run id if one of the same second exists.
    """
    from gradmm.outputs.plot_style import png, svg  # imports matplotlib

    folder, record = new_folder(root, record)
    publish(folder / TABLES, page.encode())
    for name, figure in pictures.items():
        publish(folder / f"{name}.svg", svg(figure).encode())
        publish(folder / f"{name}.png", png(figure))
    publish(folder / "run.json", record.model_dump_json(indent=2).encode())
    return record


def machine() -> str:
    """Describe the hardware: '2 cores (x86_64), no GPU'."""
    import torch  # takes seconds to import

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{cores} cores ({platform.machine()}), {', '.join(gpus) or 'no GPU'}"


def source_commit() -> str | None:
    """Return the git commit of this code, with `-dirty` if files were changed; None without a checkout."""
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)  # fails for a venv inside another checkout
        return _git(here.parent, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
