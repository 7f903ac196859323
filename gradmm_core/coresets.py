"""Real rows that stand for many: the coresets that synthetic texts are compared with.

Both methods are greedy, so the first n rows of a larger selection are the selection of n. Both begin with the row
nearest to the mean, and of equally good rows take the first. They look at private records: what they select is as
private as these, and is measured, never released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

#: Row numbers in the order of selection; all of them where there are fewer than asked for.
Selection = Callable[[Float[Tensor, "rows dims"], int], list[int]]


def herding(embeddings: Float[Tensor, "rows dims"], count: int) -> list[int]:
    """Rows whose mean is near the mean of all: each brings it as near as one row can (Welling 2009; Rebuffi 2017).

    No row is taken twice. The mean of the first k is at most D / sqrt(k) away, where D is the largest distance of
    a row from the mean.
    """
    centred = embeddings - embeddings.mean(dim=0)
    squares = centred.square().sum(dim=1)
    taken = torch.zeros(len(centred), dtype=torch.bool, device=centred.device)
    total = torch.zeros_like(centred[0])
    chosen: list[int] = []
    while len(chosen) < min(count, len(centred)):
        # ||total + x||^2, but for what all rows share.
        costs = 2 * (centred @ total) + squares
        row = int(costs.masked_fill(taken, torch.inf).argmin())
        taken[row] = True
        total += centred[row]
        chosen.append(row)
    return chosen


def k_center_greedy(embeddings: Float[Tensor, "rows dims"], count: int) -> list[int]:
    """Rows near to which all others are: each is the one farthest from those before it (Gonzalez 1985).

    The largest distance of a row to its nearest selected one is at most twice the least that is possible.
    """
    row = int(_distances(embeddings, embeddings.mean(dim=0)).argmin())
    nearest = torch.full_like(embeddings[:, 0], torch.inf)
    chosen: list[int] = []
    while len(chosen) < min(count, len(embeddings)):
        chosen.append(row)
        nearest = torch.minimum(nearest, _distances(embeddings, embeddings[row]))
        nearest[row] = -1.0  # not again, where only copies of selected rows are left
        row = int(nearest.argmax())
    return chosen


#: By the names that they have in tables.
CORESETS: dict[str, Selection] = {"herding": herding, "k-center": k_center_greedy}


def select_per_class(
    select: Selection, embeddings: Float[Tensor, "rows dims"], labels: Sequence[int], count: int
) -> dict[int, list[int]]:
    """For each label, in increasing order, the rows selected among its own."""
    of_rows = torch.tensor(labels)
    rows_of = {label: (of_rows == label).nonzero()[:, 0] for label in sorted(set(labels))}
    return {label: rows[select(embeddings[rows], count)].tolist() for label, rows in rows_of.items()}


def _distances(rows: Float[Tensor, "rows dims"], point: Float[Tensor, " dims"]) -> Float[Tensor, " rows"]:
    """By differences: products would lose small distances far from the origin."""
    return torch.cdist(rows, point[None], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]
