"""Sum clipped vectors for a release: those of real records and, with the same code, of the audit's canaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradmm.gradients.head_gradient import HeadGradients, clip_scales
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms

#: Vectors with more coordinates are not built for the floating-point sampler, but summed by their factors.
MAX_BUILT = 2**17


@dataclass
class ExactSum:
    """A running sum in float64 without rounding errors, however many parts it has (Knuth's two-sum).

    Attributes:
        high, low: the sum's leading and trailing digits; scalar zeros before the first part.
    """

    high: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    low: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    @property
    def total(self) -> Tensor:
        """The sum, of the shape of its parts."""
        return self.high + self.low

    def add_part(self, part: Tensor) -> None:
        """Add a part, in float64."""
        total = self.high + part
        added = total - self.high
        self.low = self.low + ((self.high - (total - added)) + (part - added))
        self.high = total


@dataclass
class ClippedSum(ExactSum):
    """A running sum of clipped vectors, in float64 so that rounded norms let no vector exceed C noticeably.

    Attributes:
        clipped: the number of vectors that were longer than the clipping norm.
    """

    clipped: int = 0

    def add(
        self,
        gradients: HeadGradients,
        clipping_norm: float | Float[Tensor, " records"],
        mechanism: GaussianMechanism | None,
        counted: Bool[Tensor, " records"] | None = None,
        off_centre: bool = True,
    ) -> ClippedSum:
        """Add records. For the discrete sampler their vectors are rounded to its grid; the sum is then exact.

        Each record's factor is computed in the whole batch, so that no other record's presence changes its bits.

        Args:
            clipping_norm: one for all records, or each one's own.
            counted: false for records that count as zero; None: all are counted.
            off_centre: whether a centre may have been subtracted, among the factors too. By factors, the norm of a
                vector near it is a small difference of large numbers, and may be wrong.
        """
        discrete = mechanism if mechanism is not None and mechanism.discrete else None
        coordinates = gradients.residual.shape[-1] * gradients.hidden.shape[-1]
        built = discrete or (mechanism is not None and off_centre and coordinates <= MAX_BUILT)
        vectors = gradients.materialise() if built else None
        norms = gradients.norms() if vectors is None else vectors.flatten(1).norm(dim=1)
        scales = clip_scales(norms, clipping_norm)
        if counted is None:
            counted = torch.ones_like(norms, dtype=torch.bool)
        if vectors is None:
            total = gradients.select(counted).weighted_sum(scales[counted])
        else:
            clipped = (vectors * scales[:, None, None])[counted]
            if discrete:
                below = clipped * (1 - 1e-9)  # a margin for rounding
                clipped = torch.from_numpy(discrete.quantise(below.cpu().numpy()))
            total = clipped.sum(dim=0)
        self.add_part(total.cpu())
        self.clipped += int((norms > clipping_norm)[counted].sum())
        return self


class RecordVectors(NamedTuple):
    """The vectors of a batch of one class's records, before clipping.

    If several records belong to one unit of privacy, a row holds the unit's records of this class: the vector of a
    unit is the mean of its records' vectors.

    Attributes:
        gradients: in the target's space, float64. Those of a unit are the sum over its records of this class,
            divided by the number of all its records.
        features: x of each text, of norm at most 1, float64; zero where a unit has fewer texts. None without a
            probe.
        present: false at rows without a record.
        units: None if each record is a unit.
        tokens: `token_presence` of each text, of norm at most 1, float64; of a unit, the sum over its records of
            this class, divided by the number of all its records. None if no token sums are released.
    """

    gradients: HeadGradients
    features: Float[Tensor, "rows texts features"] | None
    present: Bool[Tensor, " rows"]
    units: UnitSizes | None = None
    tokens: Float[Tensor, "rows tokens"] | None = None


class UnitSizes(NamedTuple):
    """The number of each unit's records, and the share of them that is in one class."""

    records: Float[Tensor, " rows"]
    share: Float[Tensor, " rows"]


@dataclass
class RecordSums:
    """The sums over one class's records that a release contains, each part clipped to its own norm.

    Attributes:
        gradient: rows x dimensions; the clipped gradients.
        class_sum: 1 x features; the features x, times `norms.class_sum`. Zero without a probe.
        second_moment: features x features; x x^T, times `norms.second_moment`. Zero if not released.
        token_sum: 1 x tokens; the texts' tokens, times `norms.token_sum`. Zero if not released.
        records: the number of records that were added.
        ignored: the number of those that count as zero.
    """

    gradient: ClippedSum = field(default_factory=ClippedSum)
    class_sum: ClippedSum = field(default_factory=ClippedSum)
    second_moment: ClippedSum = field(default_factory=ClippedSum)
    token_sum: ClippedSum = field(default_factory=ClippedSum)
    records: int = 0
    ignored: int = 0

    def add(self, vectors: RecordVectors, norms: ReleaseNorms, mechanism: GaussianMechanism | None) -> RecordSums:
        """Add records. With a mechanism, one whose gradient or features are not finite counts as zero.

        A unit with the share w of its records in this class has the norms sqrt(w) C here. The squares of these add
        up to C^2 over the classes, which have coordinates of their own. The second moment is one sum over all
        classes, so its norm is w C.
        """
        gradients, features, present, units, tokens = vectors
        finite = gradients.norms().isfinite()
        if features is not None:
            finite &= features.isfinite().flatten(1).all(dim=1)
        if tokens is not None:
            finite &= tokens.isfinite().all(dim=1)
        counted = present if mechanism is None else present & finite
        one = torch.ones_like(finite, dtype=torch.float64)
        records, share = units or UnitSizes(one, one)
        if features is not None:
            # The means of x and of x x^T in the form of `HeadGradients`, as products of two factors.
            weights = (1 / records)[:, None, None]
            ones = weights.expand(-1, features.shape[1], 1)
            sums = HeadGradients(ones, norms.class_sum * features)
            self.class_sum.add(sums, norms.class_sum * share.sqrt(), mechanism, counted, off_centre=False)
            if norms.second_moment:
                products = HeadGradients(weights * features, norms.second_moment * features)
                self.second_moment.add(products, norms.second_moment * share, mechanism, counted, off_centre=False)
        if tokens is not None:
            whole = HeadGradients(torch.ones_like(tokens[:, :1, None]), norms.token_sum * tokens[:, None])
            self.token_sum.add(whole, norms.token_sum * share.sqrt(), mechanism, counted, off_centre=False)
        self.gradient.add(gradients, norms.gradient * share.sqrt(), mechanism, counted)
        self.records += int(present.sum())
        self.ignored += int((present & ~counted).sum())
        return self
