"""Apply the clipping and the noise of a real release, with all its parts, to the audit's canaries."""

from __future__ import annotations

import numpy as np
import torch

from gradmm.audit.mechanism_audit import MechanismAudit, mechanism_audit
from gradmm.config.settings import MechanismAuditSettings
from gradmm.gradients.head_gradient import HeadGradients
from gradmm.privacy.clipped_sum import ClippedSum
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms


def audit_release(
    mechanism: GaussianMechanism, norms: ReleaseNorms, settings: MechanismAuditSettings, seed: int
) -> MechanismAudit:
    """Audit the mechanism of a release with canaries. Needs no private data."""
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
    """The clipping and the noise of a target's release, applied to canaries: dense vectors made by the audit.

    Each part of the release has the same share of a canary's coordinates as of the squared clipping norm. A canary
    in a random direction then exceeds every part's norm by about the same factor.
    """

    #: Rows of a part's matrix, and coordinates: more than the default number of canaries, which can be orthogonal.
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
        """Sum the records' clipped vectors (records x dims) by the code that sums those of real records."""
        if not len(records):
            return np.zeros(self.dims)
        begin, sums = 0, []
        for norm, columns in self._parts:
            end = begin + self.ROWS * columns
            dense = torch.from_numpy(records[:, begin:end]).view(-1, self.ROWS, columns)
            # As factors: the unit vector e_t as residual, and row t of the matrix as hidden state.
            rows = torch.eye(self.ROWS, dtype=torch.float64).expand(len(dense), -1, -1)
            sums.append(ClippedSum().add(HeadGradients(rows, dense), norm, self._mechanism).total.flatten())
            begin = end
        return torch.cat(sums).numpy()

    def noise(self, count: int) -> np.ndarray:
        """Draw the noise of `count` releases (count x dims)."""
        return self._mechanism.noise((count, self.dims))
