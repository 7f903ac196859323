"""What the mechanism's audit is run on: the clipping and the noise of a real release, of all its parts."""

from __future__ import annotations

import numpy as np
import torch

from gradmm_core.clipped_sum import ClippedSum
from gradmm_core.head_gradient import HeadGradients
from gradmm_core.mechanism_audit import MechanismAudit, mechanism_audit
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.release_norms import ReleaseNorms
from gradmm_core.settings import MechanismAuditSettings


def audit_release(
    mechanism: GaussianMechanism, norms: ReleaseNorms, settings: MechanismAuditSettings, seed: int
) -> MechanismAudit:
    """Puts canaries through the mechanism of a release. No private data are needed."""
    return mechanism_audit(
        CanaryRelease(mechanism, norms),
        mechanism,
        settings.draws_of(mechanism.sampler),
        settings.canaries,
        settings.guesses,
        settings.confidence,
        seed,
    )


class CanaryRelease:
    """The clipping and the noise of a target's release, for canaries: dense vectors of the audit's making.

    A part of a canary has as much of its coordinates as the part has of the squared clipping norm: one in a random
    direction is about as far beyond each part's norm.
    """

    #: Rows of a part's matrix, and coordinates: more than the audit has canaries, so that they can be orthogonal.
    ROWS, DIMS = 4, 512

    def __init__(self, mechanism: GaussianMechanism, norms: ReleaseNorms) -> None:
        self._mechanism = mechanism
        whole = sum(norm**2 for norm in norms)
        columns = self.DIMS // self.ROWS
        self._parts = [(norm, round(columns * norm**2 / whole)) for norm in norms if norm > 0]

    @property
    def dims(self) -> int:
        return self.ROWS * sum(columns for _, columns in self._parts)

    def sum_of(self, records: np.ndarray) -> np.ndarray:
        """Of the records' clipped vectors (records x dims): by the code that sums those of real records."""
        if not len(records):
            return np.zeros(self.dims)
        begin, sums = 0, []
        for norm, columns in self._parts:
            end = begin + self.ROWS * columns
            dense = torch.from_numpy(records[:, begin:end]).view(-1, self.ROWS, columns)
            # As factors: a one in row t of the residual, and row t of the gradient for its hidden state.
            rows = torch.eye(self.ROWS, dtype=torch.float64).expand(len(dense), -1, -1)
            sums.append(ClippedSum().add(HeadGradients(rows, dense), norm, self._mechanism).total.flatten())
            begin = end
        return torch.cat(sums).numpy()

    def noise(self, count: int) -> np.ndarray:
        """Of so many releases (count x dims)."""
        return self._mechanism.noise((count, self.dims))
