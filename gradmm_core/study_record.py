"""The record of a study, and its folder: the tables, the pictures, and what they were made with.

A study holds a recipe's texts against others: `compare` and the flows beside it.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradmm_core.arms import PRODUCT
from gradmm_core.artifacts import Root, StageArtifact, publish
from gradmm_core.privacy import Guarantee
from gradmm_core.run_folder import new_folder
from gradmm_core.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: In the run's folder.
TABLES = "tables.md"

_ALL_BUT_THE_TARGET = (
    "Each has texts generated anew, draws other random rows, and fine-tunes in another order. The target is the "
    "same for all, and so are the rows of herding and k-center."
)

#: Studies of what happens along fine-tuning, with one learning rate for all arms. Nothing is tested.
ALONG_PATHS = ("gradients", "bounds")

#: What a seed stands for, by study.
SEEDS_ARE = {
    "compare": _ALL_BUT_THE_TARGET,
    "transfer": _ALL_BUT_THE_TARGET,
    "ablate": _ALL_BUT_THE_TARGET,
    "epsilon": f"{_ALL_BUT_THE_TARGET} How much another draw of the noise would differ is in no interval.",
    "scarce": "Each draws other real rows, has other texts generated from them, and fine-tunes in another order.",
    "gradients": _ALL_BUT_THE_TARGET,
    "bounds": _ALL_BUT_THE_TARGET,
    "distribution": "Each has texts generated anew, draws other random rows, and other test rows for both.",
}


class StudyRecord(RunRecord, frozen=True):
    """A run that compares. `guarantee` is that of the recipe's own texts, `guarantees` those of every private arm.

    `study` is the flow's name and that of the stage with its table. `command` is empty where it was not started by
    one; `commit` is None where the code is no git checkout.
    """

    study: str
    command: tuple[str, ...]
    commit: str | None
    machine: str
    arms: tuple[str, ...]
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    guarantees: dict[str, Guarantee]

    @property
    def table(self) -> StageArtifact:
        """The rows of the study's own stage."""
        return StageArtifact.model_validate(self.stage(self.study).model_dump())


def write_study(root: Root, record: StudyRecord, page: str, pictures: Mapping[str, Figure]) -> StudyRecord:
    """Writes `<root>/runs/<run id>/`: tables.md, each picture as .svg and .png and, last, run.json.

    Returns:
        The record, with another run id if a run of the same second has taken this one.
    """
    from gradmm_core.plot_style import png, svg  # late: it imports matplotlib

    folder, record = new_folder(root, record)
    publish(folder / TABLES, page.encode())
    for name, figure in pictures.items():
        publish(folder / f"{name}.svg", svg(figure).encode())
        publish(folder / f"{name}.png", png(figure))
    publish(folder / "run.json", record.model_dump_json(indent=2).encode())
    return record


def notes(record: StudyRecord) -> list[str]:
    """What has to be known of a table's making."""
    recipe = record.recipe
    rate, rows = _along_a_path(record) if record.study in ALONG_PATHS else _on_test(record)
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    made = f"`{shlex.join(record.command)}`" if record.command else "made from Python"
    return [
        "Measured on private data, and herding, k-center and random are rows of it: not for publication.",
        f"{PRODUCT}, by {recipe.generation.method}: {record.guarantee.sentence}",
        *(f"{arm}: {guarantee.sentence}" for arm, guarantee in record.guarantees.items()),
        f"Model {recipe.model.name}, {record.model['digest'][:12]}. Fine-tuning: {recipe.finetune_eval.steps} "
        f"steps of {recipe.finetune_eval.batch_size}; {rate}.",
        f"Seeds {', '.join(map(str, record.seeds))}. {SEEDS_ARE[record.study]}",
        rows,
        f"{record.started:%Y-%m-%d}, {made}, commit {record.commit or 'not known'}, on "
        f"{record.machine}. {versions}.",
    ]


def _on_test(record: StudyRecord) -> tuple[str, str]:
    """How the learning rate was chosen, and which rows figures are of."""
    settings = record.recipe.finetune_eval
    rows = min(record.data["test"]["rows"], settings.max_test_rows or math.inf)
    return (
        "the first seed chooses the learning rate on validation, of "
        f"{', '.join(f'{rate:g}' for rate in settings.learning_rates)}",
        f"{rows:,} test rows, the same ones for every arm. Other rows would move every accuracy, with a standard "
        f"error of up to {0.5 / math.sqrt(rows):.3f}: no interval has that, and a small lead may be these rows'.",
    )


def _along_a_path(record: StudyRecord) -> tuple[str, str]:
    figures = record.stage("gradient_path").figures
    return (
        f"{figures['learning_rate']:g} is the learning rate of every arm",
        f"{figures['real_rows']:,} random train rows stand for the real data, as evenly over the classes as it "
        "goes, the same ones for every arm and seed: how much other rows would differ is in no interval.",
    )


def machine() -> str:
    """What it runs on, in words: '2 cores (x86_64), no GPU'."""
    import torch  # late, see tasks/stage.py

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{cores} cores ({platform.machine()}), {', '.join(gpus) or 'no GPU'}"


def source_commit() -> str | None:
    """The git commit of this code, with `-dirty` after it if files were changed; None without a checkout."""
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)  # not a checkout that only has us in a venv
        return _git(here.parent, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
