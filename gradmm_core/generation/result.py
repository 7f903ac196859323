"""The result of a generation method."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class GenerationResult:
    """Texts, their losses and the history of the search.

    `token_ids` are padded with `PAD` after a text's end. `losses` belong to `token_ids`. `history[t]` holds the
    matching losses of the texts at iteration t.
    """

    token_ids: Int[Tensor, "batch tokens"]
    losses: Float[Tensor, " batch"]
    history: Float[Tensor, "iterations batch"]
