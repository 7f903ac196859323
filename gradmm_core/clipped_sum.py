"""The sum that is released: of real records' clipped gradients, and of the audit's canaries, by the same code."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
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


class CanaryRelease:
    """The clipping and the noise of a target's release, for canaries: dense gradients of the audit's making."""

    #: Rows and columns of a canary: more coordinates than the audit has canaries, so that they can be orthogonal.
    SHAPE = (4, 128)

    def __init__(self, mechanism: GaussianMechanism) -> None:
        self._mechanism = mechanism

    @property
    def dims(self) -> int:
        return math.prod(self.SHAPE)

    def sum_of(self, records: np.ndarray) -> np.ndarray:
        """Of the records' clipped gradients (records x dims): by the code that sums those of real records."""
        if not len(records):
            return np.zeros(self.dims)
        dense = torch.from_numpy(records).view(-1, *self.SHAPE)
        # As factors: a one in row t of the residual, and row t of the gradient for its hidden state.
        rows = torch.eye(self.SHAPE[0], dtype=torch.float64).expand(len(dense), -1, -1)
        total, _ = clipped_sum([HeadGradients(rows, dense)], self._mechanism.clipping_norm, self._mechanism)
        return total.flatten().numpy()

    def noise(self, count: int) -> np.ndarray:
        """Of so many releases (count x dims)."""
        return self._mechanism.noise((count, self.dims))
