"""Coresets: real rows that represent a data set, as a baseline for synthetic texts.

Both methods are greedy, so the first n rows of a larger selection are the selection of size n. Both begin with the
row nearest to the mean and break ties by the row number. They read private records: a selection is as private as
they are, and is evaluated but never released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

#: Returns row numbers in the order of selection; all rows if there are fewer than requested.
Selection = Callable[[Float[Tensor, "rows dims"], int], list[int]]


def herding(embeddings: Float[Tensor, "rows dims"], count: int) -> list[int]:
    """Select rows whose mean approximates the mean of all rows (Welling 2009; Rebuffi 2017).

    Each step takes the row that brings the mean of the selection nearest to it, without replacement. The mean of
    the first k rows is at most D / sqrt(k) away, where D is the largest distance of a row from the mean.
    """
    centred = embeddings - embeddings.mean(dim=0)
    squares = centred.square().sum(dim=1)
    taken = torch.zeros(len(centred), dtype=torch.bool, device=centred.device)
    total = torch.zeros_like(centred[0])
    chosen: list[int] = []
    while len(chosen) < min(count, len(centred)):
        # ||total + x||^2 without the term that is constant over rows.
        costs = 2 * (centred @ total) + squares
        row = int(costs.masked_fill(taken, torch.inf).argmin())
        taken[row] = True
        total += centred[row]
        chosen.append(row)
    return chosen


def k_center_greedy(embeddings: Float[Tensor, "rows dims"], count: int) -> list[int]:
    """Select rows that cover all others: each is the row farthest from the selection so far (Gonzalez 1985).

    The largest distance of a row from its nearest selected row is at most twice the optimum.
    """
    row = int(_distances(embeddings, embeddings.mean(dim=0)).argmin())
    nearest = torch.full_like(embeddings[:, 0], torch.inf)
    chosen: list[int] = []
    while len(chosen) < min(count, len(embeddings)):
        chosen.append(row)
        nearest = torch.minimum(nearest, _distances(embeddings, embeddings[row]))
        nearest[row] = -1.0  # never selected twice, even if only copies of selected rows remain
        row = int(nearest.argmax())
    return chosen


#: By the arm's name.
CORESETS: dict[str, Selection] = {"herding": herding, "k-center": k_center_greedy}


def select_per_class(
    select: Selection, embeddings: Float[Tensor, "rows dims"], labels: Sequence[int], count: int
) -> dict[int, list[int]]:
    """Select rows within each class, by label in increasing order."""
    row_labels = torch.tensor(labels)
    class_rows = {label: (row_labels == label).nonzero()[:, 0] for label in sorted(set(labels))}
    return {label: rows[select(embeddings[rows], count)].tolist() for label, rows in class_rows.items()}


def _distances(rows: Float[Tensor, "rows dims"], point: Float[Tensor, " dims"]) -> Float[Tensor, " rows"]:
    """Compute distances by differences: matrix products lose small distances far from the origin."""
    return torch.cdist(rows, point[None], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]
