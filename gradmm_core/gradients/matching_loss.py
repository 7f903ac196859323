"""Compute the matching loss between a gradient g and the target G.

    cosine      1 - cos(g, G)             the paper's loss; compares directions only
    distance    |g - G|^2 / |G|^2         also compares lengths

The relative lengths of the classes' mean gradients determine where fine-tuning moves the decision boundary. Texts
that match directions only can be easier for the model than the real texts of one class and as hard as those of the
other. Fine-tuning on them moves the boundary to a different place.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.config.settings import MatchingLoss


def matching_loss(
    loss: MatchingLoss,
    products: Float[Tensor, "*gradients"],
    squares: Float[Tensor, "*gradients"],
    target_square: Float[Tensor, ""],
) -> Float[Tensor, "*gradients"]:
    """Compute the loss from <g, G>, |g|^2 and |G|^2.

    The cosine loss is in [0, 2], and 1 if g or G vanishes. The distance loss is at least 0, and 1 if g vanishes.
    """
    tiny = torch.finfo(squares.dtype).tiny
    if loss == "distance":
        return (squares - 2 * products) / target_square.clamp_min(tiny) + 1
    # Two roots, because the product of the squares can overflow. The floor keeps the derivative finite at zero.
    norms = squares.clamp_min(tiny).sqrt() * target_square.sqrt()
    return 1 - products / norms.clamp_min(tiny)
