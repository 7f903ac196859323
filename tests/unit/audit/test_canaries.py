from __future__ import annotations

import numpy as np
import pytest

from gradmm.audit.canaries import CanaryRelease
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms

C = 1.0


@pytest.mark.parametrize("probe_share", [0.0, 0.5])
def test_a_canary_goes_through_every_part_of_a_release(probe_share: float) -> None:
    norms = ReleaseNorms.of(C, probe_share)
    mechanism = GaussianMechanism(
        epsilon=1.0, delta=1e-5, clipping_norm=C, adjacency="add-or-remove", calibration="analytic"
    )
    release = CanaryRelease(mechanism, norms)
    canary = np.random.default_rng(0).normal(size=(1, release.dims))
    summed = release.sum_of(1e3 * canary)
    assert len(summed) == release.dims == release.noise(1).shape[1] == 512
    assert np.linalg.norm(summed) == pytest.approx(C, rel=1e-9)
    begin = 0
    for norm in norms:
        part = summed[begin : begin + round(512 * norm**2 / C**2 / 4) * 4]
        assert np.linalg.norm(part) == pytest.approx(norm, rel=1e-9)
        begin += len(part)
    # Nearly all of the norm is in the canary's own direction.
    assert float(summed @ canary[0]) / np.linalg.norm(canary) > 0.99 * C
