"""How far a gradient g is from the target G: what a matching loss is, whatever g is the gradient of.

    cosine      1 - cos(g, G)             the paper's: knows the direction alone
    distance    |g - G|^2 / |G|^2         knows the length too

The lengths of the classes' mean gradients, one beside the other, decide where fine-tuning moves the boundary
between the classes. Texts that match directions alone can be easier for the model than the real ones of one class
and as hard as those of the other, and then they move it somewhere else.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm_core.settings import MatchingLoss


def matching_loss(
    loss: MatchingLoss,
    products: Float[Tensor, "*gradients"],
    squares: Float[Tensor, "*gradients"],
    target_square: Float[Tensor, ""],
) -> Float[Tensor, "*gradients"]:
    """From <g, G>, |g|^2 and |G|^2.

    Between 0 and 2 by cosine, and 1 where g or G vanishes. By distance from 0 on, and 1 where g vanishes.
    """
    tiny = torch.finfo(squares.dtype).tiny
    if loss == "distance":
        return (squares - 2 * products) / target_square.clamp_min(tiny) + 1
    # Two roots, because the dtype may not hold the product. The floor keeps the slope at zero finite.
    norms = squares.clamp_min(tiny).sqrt() * target_square.sqrt()
    return 1 - products / norms.clamp_min(tiny)
