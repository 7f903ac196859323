"""The record of a comparison, and its folder: the table, the picture, and what they were made with."""

from __future__ import annotations

import math
import shlex
import subprocess
from pathlib import Path

from gradmm_core.arms import PRODUCT
from gradmm_core.artifacts import Root, StageArtifact, publish
from gradmm_core.compare import comparison_markdown
from gradmm_core.privacy import Guarantee
from gradmm_core.run_folder import new_folder
from gradmm_core.run_record import RunRecord


class CompareRecord(RunRecord, frozen=True):
    """A run that compares. `guarantee` is that of the recipe's own texts, `guarantees` those of every private arm.

    `command` is empty where it was not started by one; `commit` is None where the code is no git checkout.
    """

    command: tuple[str, ...]
    commit: str | None
    arms: tuple[str, ...]
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    guarantees: dict[str, Guarantee]

    @property
    def table(self) -> StageArtifact:
        """The rows of the stage `compare`."""
        return StageArtifact.model_validate(self.stage("compare").model_dump())


def write_comparison(root: Root, record: CompareRecord) -> CompareRecord:
    """Writes `<root>/runs/<run id>/`: comparison.md, accuracy.svg, accuracy.png and, last, run.json.

    Returns:
        The record, with another run id if a run of the same second has taken this one.
    """
    from gradmm_core import plots  # late: it imports matplotlib

    folder, record = new_folder(root, record)
    figure = plots.accuracy_by_size(record.table.read())
    publish(folder / "comparison.md", comparison_page(record).encode())
    publish(folder / "accuracy.svg", plots.svg(figure).encode())
    publish(folder / "accuracy.png", plots.png(figure))
    publish(folder / "run.json", record.model_dump_json(indent=2).encode())
    return record


def comparison_page(record: CompareRecord) -> str:
    """The tables in Markdown, with all that has to be known of their making."""
    return comparison_markdown(record.table.read(), f"{record.recipe.name}: arms", notes(record))


def notes(record: CompareRecord) -> list[str]:
    """What has to be known of a table's making."""
    recipe = record.recipe
    rows = min(record.data["test"]["rows"], recipe.finetune_eval.max_test_rows or math.inf)
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    made = f"`{shlex.join(record.command)}`" if record.command else "made from Python"
    return [
        "Measured on private data, and herding, k-center and random are rows of it: not for publication.",
        f"{PRODUCT}, by {recipe.generation.method}: {record.guarantee.sentence}",
        *(f"{arm}: {guarantee.sentence}" for arm, guarantee in record.guarantees.items()),
        f"Model {recipe.model.name}, {record.model['digest'][:12]}. Fine-tuning: {recipe.finetune_eval.steps} "
        f"steps of {recipe.finetune_eval.batch_size}; the first seed chooses the learning rate on validation, of "
        f"{', '.join(f'{rate:g}' for rate in recipe.finetune_eval.learning_rates)}.",
        f"Seeds {', '.join(map(str, record.seeds))}: of fine-tuning, and of the draw of random rows. Texts are "
        "generated once: how much another generation would differ is in no interval.",
        f"{rows:,} test rows, the same ones for every arm. Other rows would move every accuracy, with a standard "
        f"error of up to {0.5 / math.sqrt(rows):.3f}: no interval has that, and a small lead may be these rows'.",
        f"{record.started:%Y-%m-%d}, {made}, commit {record.commit or 'not known'}. {versions}.",
    ]


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
