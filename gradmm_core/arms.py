"""What a comparison fine-tunes on: the product's texts, and all that they have to beat.

An arm of n texts is the first n of its texts in their own order, as evenly over the classes as it goes, so that
a generation serves all sizes. The order is that of

    gradmm, rerank       the matching loss, after all filters
    zero-shot, few-shot  writing: nothing but the label filter chooses (of two near duplicates the one that matches
                         better stays)
    herding, k-center    selection
    random, real-1k      a draw that each seed makes anew
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from gradmm_core.filters import kept_texts

#: Texts in all, as in the paper.
SIZES = (5, 10, 20, 50, 100)

#: Real rows of the study `scarce`, in all, as in the paper.
FEW = (5, 10, 20, 50)

#: Of the study `epsilon`.
EPSILONS = (0.01, 0.05, 0.2, 1.0)

#: What studies hold the product's texts against by default. `random` has real text's own distance from real text.
ARMS_OF = {
    "transfer": ("before", "zero-shot", "random", "real-1k"),
    "distribution": ("zero-shot", "rerank", "random"),
    "gradients": ("zero-shot", "random"),
    "bounds": ("zero-shot", "random"),
}

#: Rows of the arm `real-1k`, in all.
REAL_1K = 1000

Source = Literal["nothing", "synthetic", "written", "coreset", "train"]


@dataclass(frozen=True)
class Arm:
    """`source`: what its texts come from. Those of `coreset` and `train` are rows of the private train split."""

    name: str
    source: Source

    @property
    def private_rows(self) -> bool:
        return self.source in ("coreset", "train")

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Of the sizes asked for, those that the arm has; `before` and `real-1k` have one of their own."""
        return {"before": [0], "real-1k": [REAL_1K]}.get(self.name, list(sizes))


#: The product's own arm, which all others are held against.
PRODUCT = "gradmm"

ARMS = {
    arm.name: arm
    for arm in (
        Arm("before", "nothing"),
        Arm("zero-shot", "written"),
        Arm("few-shot", "written"),
        Arm("rerank", "synthetic"),
        Arm("herding", "coreset"),
        Arm("k-center", "coreset"),
        Arm("random", "train"),
        Arm("real-1k", "train"),
        Arm(PRODUCT, "synthetic"),
    )
}


#: All rows that there are, where there are few.
REAL_ROWS = Arm("real rows", "train")


def private_arm(epsilon: float) -> Arm:
    """The product's arm under a guarantee that the recipe does not have."""
    return Arm(f"{PRODUCT}, epsilon {epsilon:g}", "synthetic")


def class_counts(size: int, labels: Sequence[int]) -> dict[int, int]:
    """`size` texts as evenly over the classes as it goes: of what is left over, the first classes get one each."""
    each, left = divmod(size, len(labels))
    return {label: each + (place < left) for place, label in enumerate(labels)}


def first_texts(texts: pd.DataFrame, arm: Arm, counts: Mapping[int, int]) -> pd.DataFrame:
    """The first `counts[label]` of an arm's texts, from the rows of its last filter and in their order there.

    There are fewer where a class has not as many.
    """
    order = ["rank", "id"] if arm.source == "synthetic" else ["id"]
    kept = kept_texts(texts)
    place = kept.sort_values(order).groupby("label").cumcount()
    return kept[place.reindex(kept.index) < kept["label"].map(counts)].reset_index(drop=True)
