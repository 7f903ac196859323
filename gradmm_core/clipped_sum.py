"""The sum that is released: of real records' clipped gradients and, by the same code, of the audit's canaries."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm_core.head_gradient import HeadGradients
from gradmm_core.privacy import GaussianMechanism


def clipped_sum(
    batches: Iterable[HeadGradients], clipping_norm: float, mechanism: GaussianMechanism | None
) -> tuple[Float[Tensor, "rows dimensions"], int]:
    """In float64: a norm that is a rounding error too small would let a record through that is too large.

    With the discrete sampler, of the records' vectors on its grid: such a sum is exact, in any order.
    """
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    for gradients in batches:
        if mechanism is not None and mechanism.discrete:
            scales = gradients.clip_scales(clipping_norm) * (1 - 1e-9)  # so that no rounding exceeds C
            vectors = (gradients.materialise() * scales[:, None, None]).cpu().numpy()
            total = total + torch.from_numpy(mechanism.quantise(vectors).sum(axis=0))
        else:
            total = total + gradients.clipped_sum(clipping_norm).cpu()
        clipped += int((gradients.norms() > clipping_norm).sum())
    return total, clipped
