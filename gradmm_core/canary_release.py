"""What the mechanism's audit is run on: the clipping and the noise of a real release."""

from __future__ import annotations

import math

import numpy as np
import torch

from gradmm_core.clipped_sum import ClippedSum
from gradmm_core.head_gradient import HeadGradients
from gradmm_core.mechanism_audit import MechanismAudit, mechanism_audit
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.settings import MechanismAuditSettings


def audit_release(mechanism: GaussianMechanism, settings: MechanismAuditSettings, seed: int) -> MechanismAudit:
    """Puts canaries through the mechanism of a release. No private data are needed."""
    return mechanism_audit(
        CanaryRelease(mechanism),
        mechanism,
        settings.draws_of(mechanism.sampler),
        settings.canaries,
        settings.guesses,
        settings.confidence,
        seed,
    )


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
        gradients = HeadGradients(rows, dense)
        summed = ClippedSum().add(gradients, self._mechanism.clipping_norm, self._mechanism)
        return summed.total.flatten().numpy()

    def noise(self, count: int) -> np.ndarray:
        """Of so many releases (count x dims)."""
        return self._mechanism.noise((count, self.dims))
