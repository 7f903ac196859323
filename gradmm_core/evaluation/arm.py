"""One arm of a comparison: the source of the texts that a fine-tuning uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

#: Total rows of the arms of random real rows that are not as many as the texts.
FIXED_ROWS = {"real-100": 100, "real-1k": 1000}

#: Name of the arm of the model itself, calibrated by public text: no training, and no row of the data.
CALIBRATED = "calibrated model"

#: Name of the arm of all train rows, the ceiling of a comparison.
ALL_ROWS = "all rows"

Source = Literal["nothing", "synthetic", "written", "coreset", "train"]


@dataclass(frozen=True)
class Arm:
    """An arm by name. Texts of the sources `coreset` and `train` are rows of the private train split."""

    name: str
    source: Source

    @property
    def private_rows(self) -> bool:
        """Whether the arm's texts are private records."""
        return self.source in ("coreset", "train")

    def sizes(self, sizes: Sequence[int], train_rows: int | None = None) -> list[int]:
        """Return the sizes at which the arm is evaluated.

        `before`, `calibrated model`, `real-100`, `real-1k` and `all rows` have one fixed size each.

        Args:
            train_rows: size of `all rows`; if None, that arm has no size.
        """
        all_rows = [] if train_rows is None else [train_rows]
        fixed = {"before": [0], CALIBRATED: [0], ALL_ROWS: all_rows}
        fixed |= {name: [rows] for name, rows in FIXED_ROWS.items()}
        return fixed.get(self.name, list(sizes))


def first_texts(texts: pd.DataFrame, arm: Arm, counts: Mapping[int, int]) -> pd.DataFrame:
    """Select the first `counts[label]` texts written for each class, or all of a class that has fewer.

    Synthetic texts are taken by rank, all others in the order of writing. The result keeps the order of the rows.

    Args:
        texts: labelled texts of the arm.
    """
    order = ["rank", "id"] if arm.source == "synthetic" else ["id"]
    place = texts.sort_values(order).groupby("written_for").cumcount()
    return texts[place.reindex(texts.index) < texts["written_for"].map(counts)].reset_index(drop=True)
