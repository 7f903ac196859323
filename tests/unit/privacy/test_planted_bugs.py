"""Planted bugs of a privacy mechanism: each has a check that passes on our code and fails on the bug.

unit/audits/test_planted_bugs.py shows which bugs the audit finds in a run. Those here are in code that the audit's
canaries do not reach, or are found without it. test_ledger.py and tests/flows/test_privacy.py cover the ledger
(skipped, racing, killed).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from gradmm.gradients.head_gradient import HeadGradients
from gradmm.privacy.clipped_sum import ClippedSum
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.target.target_gradient import TargetSums
from gradmm.target.target_space import TargetSpace
from tests.conftest import make_mechanism

C = 1.0
ROWS, WIDTH = 6, 5

Sum = Callable[[HeadGradients, TargetSpace], Tensor]

mechanism = partial(make_mechanism, clipping_norm=C)


def ours(records: HeadGradients, space: TargetSpace) -> Tensor:
    return ClippedSum().add(space.project(records, 0), C, None).total


def without_clipping(records: HeadGradients, space: TargetSpace) -> Tensor:
    return space.project(records, 0).clipped_sum(None)


def clipped_before_projection_only(records: HeadGradients, space: TargetSpace) -> Tensor:
    scaled = HeadGradients(records.residual * records.clip_scales(C)[:, None, None], records.hidden)
    return space.project(scaled, 0).clipped_sum(None)


def divided_by_private_n(records: HeadGradients, space: TargetSpace) -> Tensor:
    return ours(records, space) / len(records.residual)


def sensitivity_is_kept(total: Sum, space: TargetSpace) -> bool:
    """Check that adding a record changes the sum by its clipped vector, whatever the other records are."""
    random = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 1e3):
        residual = size * torch.randn(9, 2, ROWS, generator=random, dtype=torch.float64)
        records = HeadGradients(residual, torch.randn(9, 2, WIDTH, generator=random, dtype=torch.float64))
        fewer = HeadGradients(records.residual[1:], records.hidden[1:])
        alone = HeadGradients(records.residual[:1], records.hidden[:1])
        moved = total(records, space) - total(fewer, space)
        own = space.project(alone, 0).materialise()[0]
        expected = own * min(1.0, C / float(own.norm()))
        if not torch.allclose(moved, expected, rtol=1e-6, atol=1e-9):
            return False
    return True


def spaces() -> list[TargetSpace]:
    basis = torch.linalg.qr(torch.randn(WIDTH, 2, dtype=torch.float64)).Q
    rows = torch.tensor([1, 4])
    centre = torch.full((2, 2), 3.0, dtype=torch.float64)
    return [TargetSpace(None, None, {}), TargetSpace(rows, basis, {}), TargetSpace(rows, basis, {0: centre})]


def test_our_sum_keeps_its_sensitivity_in_every_space() -> None:
    assert all(sensitivity_is_kept(ours, space) for space in spaces())


def test_no_clipping_is_caught() -> None:
    assert not any(sensitivity_is_kept(without_clipping, space) for space in spaces())


def test_clipping_before_projection_only_is_caught() -> None:
    """It wastes signal in a projection, and breaks the guarantee if a centre is subtracted afterwards."""
    whole, projected, centred = spaces()
    assert sensitivity_is_kept(clipped_before_projection_only, whole)  # nothing is projected there
    assert not sensitivity_is_kept(clipped_before_projection_only, projected)
    assert not sensitivity_is_kept(clipped_before_projection_only, centred)


def test_division_by_the_private_number_of_records_is_caught() -> None:
    assert not any(sensitivity_is_kept(divided_by_private_n, space) for space in spaces())


def test_halved_sensitivity_is_caught_by_the_noise_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def spread_is_right() -> bool:
        claimed = mechanism(adjacency="replace")
        drawn = claimed.noise((200_000,)).std()
        return abs(drawn / (2 * mechanism().sigma) - 1) < 0.02

    assert spread_is_right()
    monkeypatch.setattr(GaussianMechanism, "sensitivity", property(lambda self: self.clipping_norm))
    assert not spread_is_right()


def test_a_reused_seed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def releases_differ() -> bool:
        values = {0: torch.zeros(4, 4), 1: torch.zeros(4, 4)}
        sums = TargetSums(values, {0: 1, 1: 1}, 0, {0: 1.0, 1: 1.0}, 0.0, ReleaseNorms.of(C, 0.0))
        first, second = (sums.release(mechanism()).values for _ in range(2))
        return not any(torch.equal(first[label], second[other]) for label in (0, 1) for other in (0, 1))

    assert releases_differ()
    seeded = np.random.default_rng
    monkeypatch.setattr(
        "gradmm.privacy.mechanism.system_standard_normal", lambda shape: seeded(0).normal(size=shape)
    )
    assert not releases_differ()
