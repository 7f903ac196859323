"""Put canaries into a release: vectors that the audit makes itself, instead of those of private records.

They go through the code that clips and sums real records (`RecordSums`), and adds noise to the sums
(`TargetSums`). Each canary has coordinates of its own in every part of a record's vector: one of its class's
gradient, one feature, the square of this feature, and one token. Canaries are therefore orthogonal, and each is an
experiment by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradmm.gradients.head_gradient import HeadGradients
from gradmm.privacy.clipped_sum import RecordSums, RecordVectors, UnitSizes
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.target.target_gradient import Released, TargetSums

#: A canary's norm before clipping, in clipping norms. If clipping is skipped, its signal grows by this factor.
CANARY_NORM = 10.0

#: Rows of a class's gradient, and the smallest number of its columns.
ROWS, MIN_COLUMNS = 4, 64

#: Records in memory at a time; the discrete sampler builds each one's products.
BATCH = 64


@dataclass(frozen=True)
class CanaryRelease:
    """Releases of one mechanism whose records are canaries; even ones are in class 0, odd ones in class 1.

    Class 1 has a centre that is subtracted from its gradients, as in the target's space.
    """

    mechanism: GaussianMechanism
    norms: ReleaseNorms
    canaries: int

    @property
    def columns(self) -> int:
        """Columns of a class's gradient."""
        return max(MIN_COLUMNS, -(-self.canaries // (2 * ROWS)))

    @cached_property
    def labels(self) -> Int[np.ndarray, " canaries"]:
        return np.arange(self.canaries) % 2

    @cached_property
    def gradients(self) -> Float[Tensor, "canaries rows columns"]:
        """The canaries' gradients, of norm `CANARY_NORM` C, after the centre was subtracted."""
        own = torch.arange(self.canaries) // 2
        gradients = torch.zeros(self.canaries, ROWS * self.columns, dtype=torch.float64)
        gradients[torch.arange(self.canaries), own] = CANARY_NORM * self.mechanism.clipping_norm
        return gradients.view(self.canaries, ROWS, self.columns)

    @cached_property
    def features(self) -> Float[Tensor, "canaries canaries"]:
        """The canaries' features, and their tokens, of norm `CANARY_NORM`."""
        return CANARY_NORM * torch.eye(self.canaries, dtype=torch.float64)

    @cached_property
    def centre(self) -> Float[Tensor, "rows columns"]:
        """The centre of class 1."""
        count = ROWS * self.columns
        return self.mechanism.clipping_norm * torch.linspace(-1, 1, count, dtype=torch.float64).view(ROWS, -1)

    def sums(self, included: Bool[np.ndarray, " canaries"]) -> TargetSums:
        """Sum the canaries that are in. Absent ones are replaced by their negatives if records are replaced."""
        signs, present = np.ones(self.canaries), included
        if self.mechanism.adjacency == "replace":
            signs, present = np.where(included, 1.0, -1.0), np.ones_like(included)
        factors = torch.from_numpy(signs)
        gradients, features = factors[:, None, None] * self.gradients, factors[:, None] * self.features
        return self.sums_of(gradients, features, features, self.labels, torch.from_numpy(present))

    def sums_of(
        self,
        gradients: Float[Tensor, "records rows columns"],
        features: Float[Tensor, "records features"],
        tokens: Float[Tensor, "records tokens"],
        labels: Int[np.ndarray, " records"],
        present: Bool[Tensor, " records"],
        share: Float[Tensor, " records"] | None = None,
    ) -> TargetSums:
        """Sum records of given vectors, by the code that sums real ones.

        Args:
            share: the share of a unit's 1 / `share` records that is in this class; None: each record is a unit.
        """
        share = torch.ones(len(gradients), dtype=torch.float64) if share is None else share
        by_label = {0: RecordSums(), 1: RecordSums()}
        for label, sums in by_label.items():
            of_class = torch.from_numpy(np.flatnonzero(labels == label))
            centre = self.centre if label else None
            for rows in of_class.split(BATCH):
                dense = gradients[rows] + (0.0 if centre is None else centre)
                # As factors: the unit vector e_t as residual, and row t of the matrix as hidden state.
                unit = torch.eye(ROWS, dtype=torch.float64).expand(len(rows), -1, -1)
                probed = features[rows, None] if self.norms.class_sum else None
                counted = share[rows, None] * tokens[rows] if self.norms.token_sum else None
                units = UnitSizes(1 / share[rows], share[rows])
                vectors = RecordVectors(HeadGradients(unit, dense, centre), probed, present[rows], units, counted)
                sums.add(vectors, self.norms, self.mechanism)
        return TargetSums.of(by_label, self.norms, {})

    def parts(self, released: Released) -> dict[str, Float[np.ndarray, " _"]]:
        """Return each part of a release as a flat vector, in the units in which noise is added."""
        values, moments, tokens = released
        vector = {f"gradient {label}": value for label, value in values.items()}
        if moments is not None:
            for label, total in moments.class_sums.items():
                vector[f"class sum {label}"] = total * self.norms.class_sum
            if moments.second_moment is not None:
                vector["second moment"] = moments.second_moment * self.norms.second_moment
        if tokens is not None:
            for label, total in tokens.sums.items():
                vector[f"token sum {label}"] = total * self.norms.token_sum
        return {part: value.double().flatten().numpy() for part, value in vector.items()}

    def released(self, sums: TargetSums) -> dict[str, Float[np.ndarray, " _"]]:
        """Release the sums once; return the parts of the noisy vector."""
        return self.parts(sums.release(self.mechanism))

    def clean(self, sums: TargetSums) -> dict[str, Float[np.ndarray, " _"]]:
        """Return the parts of the noiseless vector."""
        return self.parts(sums.clean)

    def scores(self, parts: dict[str, Float[np.ndarray, " _"]]) -> Float[np.ndarray, " canaries"]:
        """Project a release's vector on the direction in which each canary moves it."""
        each = np.arange(self.canaries)

        def entries(part: str) -> Float[np.ndarray, " canaries"]:
            """Return the entry that each canary moves."""
            if part == "second moment":
                return parts[part].reshape(self.canaries, -1)[each, each]
            own = each // 2 if part == "gradient" else each
            return np.where(self.labels == 0, parts[f"{part} 0"][own], parts[f"{part} 1"][own])

        moved = self._moved
        shares = np.array(list(moved.values())) / math.hypot(*moved.values())
        return shares @ np.stack([entries(part) for part in moved])

    @property
    def shift(self) -> float:
        """The difference between a canary's scores when it is in and when it is out."""
        return math.hypot(*self._moved.values()) * (2.0 if self.mechanism.adjacency == "replace" else 1.0)

    @property
    def _moved(self) -> dict[str, float]:
        """How far a canary moves each part. Replaced by its negative, its second moment is the same."""
        norms = {part.replace("_", " "): norm for part, norm in self.norms._asdict().items() if norm > 0}
        if self.mechanism.adjacency == "replace":
            norms.pop("second moment", None)
        return norms
