"""The comparison with other ways of making training texts that belongs to a run, if one was made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pandas as pd

from gradmm.errors import InputError
from gradmm.outputs.formatting import percent
from gradmm.outputs.record import RunRecord
from gradmm.storage.artifacts import Root
from gradmm.storage.location import Location, read_bytes

#: The study, and its stage with the table.
STUDY = "compare"

#: Parts of a recipe that do not decide which texts it makes.
BESIDE_THE_TEXTS = ("description", "finetune_eval", "mechanism_audit", "mia_audit", "seed", "execution")


@dataclass(frozen=True)
class Comparison:
    """A finished study `compare`.

    Attributes:
        run_id: of the study.
        table: rows of the stage `compare`.
    """

    run_id: str
    table: pd.DataFrame

    @property
    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Name, number of texts, accuracy, gap recovered and number of seeds of each arm."""
        return [
            (
                str(row["arm"]),
                f"{row['size']:,}" if row["size"] else "–",
                _or_dash(row["accuracy"], row["accuracy_half_width"]),
                _or_dash(row["gap_recovered"], digits=0),
                str(row["seeds"]),
            )
            for row in self.table.to_dict("records")
        ]


def newest_comparison(root: Root, run: RunRecord) -> Comparison | None:
    """Find the newest comparison under a root with the run's data, model and settings; None if there is none.

    Settings that decide only how texts are evaluated may differ, and so may the seed. Damaged comparisons are not
    found, nor those of versions of gradmm whose records have other fields.
    """
    wanted = _identity(run.model_dump(mode="json"))
    newest_first = sorted(root.runs.glob(f"*-{STUDY}*/run.json"), key=lambda file: file.parent.name, reverse=True)
    return next(filter(None, (_comparison(root, file, wanted) for file in newest_first)), None)


def _comparison(root: Root, file: Location, wanted: dict[str, Any]) -> Comparison | None:
    try:
        study = json.loads(read_bytes(file))
        if _identity(study) != wanted:
            return None
        # A run of a recipe whose name ends in "-compare" lacks the stage.
        stage = next(stage for stage in study["stages"] if stage["stage"] == STUDY)
        # By its key: the root may have been moved since.
        table = root.find_stage(STUDY, PurePosixPath(stage["path"]).stem)
        if table is None or table.sha256 != stage["sha256"]:
            return None
        return Comparison(study["run_id"], table.read())
    except (OSError, ValueError, KeyError, TypeError, StopIteration, InputError):
        return None


def _identity(record: dict[str, Any]) -> dict[str, Any]:
    recipe = {name: value for name, value in record["recipe"].items() if name not in BESIDE_THE_TEXTS}
    return {"recipe": recipe, "data": record["data"], "model": record["model"]}


def _or_dash(value: float | None, spread: float | None = None, digits: int = 1) -> str:
    """Format a share as a percentage; a missing one, such as the accuracy of a run that diverged, as a dash."""
    if pd.isna(value):
        return "–"
    return percent(value, None if pd.isna(spread) else spread, digits)
