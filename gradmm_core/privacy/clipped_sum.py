"""Sum clipped vectors for a release: those of real records and, with the same code, of the audit's canaries."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradmm.gradients.head_gradient import HeadGradients
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms


@dataclass
class ClippedSum:
    """A running sum of clipped vectors, in float64 so that rounded norms let no vector exceed C noticeably.

    Attributes:
        high, low: the sum's leading and trailing digits, rows x dimensions; scalar zeros before the first record.
        clipped: the number of vectors that were longer than the clipping norm.
    """

    high: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    low: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    clipped: int = 0

    @property
    def total(self) -> Tensor:
        """The sum, rows x dimensions."""
        return self.high + self.low

    def add(
        self,
        gradients: HeadGradients,
        clipping_norm: float,
        mechanism: GaussianMechanism | None,
        counted: Bool[Tensor, " records"] | None = None,
    ) -> ClippedSum:
        """Add records. For the discrete sampler their vectors are rounded to its grid; the sum is then exact.

        Each record's factor is computed in the whole batch, so that no other record's presence changes its bits.

        Args:
            counted: false for records that count as zero; None: all are counted.
        """
        norms, scales = gradients.norms(), gradients.clip_scales(clipping_norm)
        if counted is None:
            counted = torch.ones_like(norms, dtype=torch.bool)
        if mechanism is not None and mechanism.discrete:
            scales = scales * (1 - 1e-9)  # a margin for rounding
            vectors = (gradients.materialise() * scales[:, None, None])[counted].cpu().numpy()
            self._add(torch.from_numpy(mechanism.quantise(vectors).sum(axis=0)))
        else:
            self._add(gradients.select(counted).weighted_sum(scales[counted]).cpu())
        self.clipped += int((norms[counted] > clipping_norm).sum())
        return self

    def _add(self, part: Tensor) -> None:
        """Add a batch's sum without a rounding error (Knuth's two-sum), however many batches there are."""
        total = self.high + part
        added = total - self.high
        self.low = self.low + ((self.high - (total - added)) + (part - added))
        self.high = total


@dataclass
class RecordSums:
    """The sums over one class's records that a release contains, each part clipped to its own norm.

    Attributes:
        gradient: rows x dimensions; the clipped gradients.
        class_sum: 1 x features; the features x, times `norms.class_sum`. Zero without a probe.
        second_moment: features x features; x x^T, times `norms.second_moment`. Zero without a probe.
        records: the number of records that were added.
        ignored: the number of those that count as zero.
    """

    gradient: ClippedSum = field(default_factory=ClippedSum)
    class_sum: ClippedSum = field(default_factory=ClippedSum)
    second_moment: ClippedSum = field(default_factory=ClippedSum)
    records: int = 0
    ignored: int = 0

    def add(
        self,
        gradients: HeadGradients,
        features: Float[Tensor, "records features"] | None,
        norms: ReleaseNorms,
        mechanism: GaussianMechanism | None,
        present: Bool[Tensor, " records"] | None = None,
    ) -> RecordSums:
        """Add records. With a mechanism, one whose gradient or features are not finite counts as zero.

        Args:
            features: x, of norm at most 1, float64; None without a probe.
            present: false at rows without a record; None: every row has one.
        """
        finite = gradients.norms().isfinite()
        if features is not None:
            finite &= features.isfinite().all(dim=1)
        if present is None:
            present = torch.ones_like(finite)
        counted = present if mechanism is None else present & finite
        if features is not None:
            # x and x x^T in the form of `HeadGradients`, as products of two factors.
            row, one = features[:, None], features.new_ones(len(features), 1, 1)
            self.class_sum.add(HeadGradients(one, norms.class_sum * row), norms.class_sum, mechanism, counted)
            products = HeadGradients(row, norms.second_moment * row)
            self.second_moment.add(products, norms.second_moment, mechanism, counted)
        self.gradient.add(gradients, norms.gradient, mechanism, counted)
        self.records += int(present.sum())
        self.ignored += int((present & ~counted).sum())
        return self
