"""Sum clipped vectors for a release: those of real records and, with the same code, of the audit's canaries."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.gradients.head_gradient import HeadGradients
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms


@dataclass
class ClippedSum:
    """A running sum of clipped vectors, in float64 so that rounded norms let no vector exceed C noticeably.

    Attributes:
        total: rows x dimensions; a scalar zero before the first record.
        records: the number of vectors in the sum.
        clipped: the number of vectors that were longer than the clipping norm.
    """

    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    records: int = 0
    clipped: int = 0

    def add(
        self, gradients: HeadGradients, clipping_norm: float, mechanism: GaussianMechanism | None
    ) -> ClippedSum:
        """Add records. For the discrete sampler their vectors are rounded to its grid; the sum is then exact."""
        if mechanism is not None and mechanism.discrete:
            scales = gradients.clip_scales(clipping_norm) * (1 - 1e-9)  # a margin for rounding
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
    """The sums over one class's records that a release contains, each part clipped to its own norm.

    Attributes:
        gradient: rows x dimensions; the clipped gradients.
        class_sum: 1 x features; the features x, times `norms.class_sum`. Zero without a probe.
        second_moment: features x features; x x^T, times `norms.second_moment`. Zero without a probe.
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
        """Add records.

        Args:
            features: x, of norm at most 1, float64; None without a probe.
        """
        if features is not None:
            # x and x x^T in the form of `HeadGradients`, as products of two factors.
            row, one = features[:, None], features.new_ones(len(features), 1, 1)
            self.class_sum.add(HeadGradients(one, norms.class_sum * row), norms.class_sum, mechanism)
            products = HeadGradients(row, norms.second_moment * row)
            self.second_moment.add(products, norms.second_moment, mechanism)
        self.gradient.add(gradients, norms.gradient, mechanism)
        return self
