"""The sum that is released: of real records' clipped gradients and, by the same code, of the audit's canaries."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm_core.head_gradient import HeadGradients
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.release_norms import ReleaseNorms


@dataclass
class ClippedSum:
    """A sum in the making: `total` (rows x dimensions, float64; a zero before the first record), how many records
    are in it, and how many of them were clipped.

    In float64: a norm that is a rounding error too small would let a record through that is too large.
    """

    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    records: int = 0
    clipped: int = 0

    def add(
        self, gradients: HeadGradients, clipping_norm: float, mechanism: GaussianMechanism | None
    ) -> ClippedSum:
        """More records. With the discrete sampler, of their vectors on its grid: exact, in any order."""
        if mechanism is not None and mechanism.discrete:
            scales = gradients.clip_scales(clipping_norm) * (1 - 1e-9)  # so that no rounding exceeds C
            vectors = (gradients.materialise() * scales[:, None, None]).cpu().numpy()
            self.total = self.total + torch.from_numpy(mechanism.quantise(vectors).sum(axis=0))
        else:
            self.total = self.total + gradients.clipped_sum(clipping_norm).cpu()
        norms = gradients.norms()
        self.records += len(norms)
        self.clipped += int((norms > clipping_norm).sum())
        return self


@dataclass
class RecordSums:
    """All that a release holds of one class's records, each part clipped to its norm.

    Attributes:
        gradient: rows x dimensions.
        class_sum: (1 x features) of features, times `norms.class_sum`; zero without any.
        second_moment: (features x features) of features' products, times `norms.second_moment`; zero without any.
    """

    gradient: ClippedSum = field(default_factory=ClippedSum)
    class_sum: ClippedSum = field(default_factory=ClippedSum)
    second_moment: ClippedSum = field(default_factory=ClippedSum)

    def add(
        self,
        gradients: HeadGradients,
        features: Float[Tensor, "records features"] | None,
        norms: ReleaseNorms,
        mechanism: GaussianMechanism | None,
    ) -> RecordSums:
        """More records.

        Args:
            features: of norm at most 1, float64; None without a probe.
        """
        if features is not None:
            # x and x x^T as head gradients are kept: as products of factors.
            row, one = features[:, None], features.new_ones(len(features), 1, 1)
            self.class_sum.add(HeadGradients(one, norms.class_sum * row), norms.class_sum, mechanism)
            products = HeadGradients(row, norms.second_moment * row)
            self.second_moment.add(products, norms.second_moment, mechanism)
        self.gradient.add(gradients, norms.gradient, mechanism)
        return self
