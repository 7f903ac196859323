from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradmm.gradients.head_gradient import HeadGradients
from gradmm.privacy.clipped_sum import ClippedSum, RecordSums, RecordVectors
from gradmm.privacy.sensitivity import ReleaseNorms
from tests.conftest import make_mechanism

C = 1.0
ROWS, WIDTH = 6, 5


def farthest_record(norms: ReleaseNorms) -> float:
    """Find the largest norm of the vector that one record adds to all parts of a release together."""
    random = torch.Generator().manual_seed(0)
    longest = 0.0
    for size in (1e-3, 1.0, 1e3):
        features = torch.randn(1, 7, generator=random, dtype=torch.float64)
        features = features / features.norm() * min(1.0, size)
        residual = size * torch.randn(1, 2, ROWS, generator=random, dtype=torch.float64)
        gradient = HeadGradients(residual, torch.randn(1, 2, WIDTH, generator=random, dtype=torch.float64))
        vectors = RecordVectors(gradient, features[:, None], torch.ones(1, dtype=torch.bool))
        sums = RecordSums().add(vectors, norms, None)
        parts = (sums.gradient.total, sums.class_sum.total, sums.second_moment.total)
        longest = max(longest, float(torch.cat([part.flatten() for part in parts]).norm()))
    return longest


@pytest.mark.parametrize("probe_share", [0.0, 0.1, 0.5, 0.9])
def test_all_parts_of_a_record_together_are_no_longer_than_c(probe_share: float) -> None:
    for class_sum_share in (0.3, 1.0):
        norms = ReleaseNorms.of(C, probe_share, class_sum_share=class_sum_share)
        assert farthest_record(norms) == pytest.approx(C, rel=1e-12)
    each_to_c = ReleaseNorms(C, C, C)
    assert farthest_record(each_to_c) > 1.7 * C


@given(st.lists(st.floats(-1.0, 1.0, allow_subnormal=False), max_size=60))
def test_batches_are_added_without_a_rounding_error(values: list[float]) -> None:
    running = ClippedSum()
    for value in values:
        vector = HeadGradients(torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([[[value]]]).double())
        running.add(vector, 1.0, None)
    exact = sum(map(Fraction, torch.tensor(values).double().tolist()), Fraction())
    assert abs(Fraction(float(running.high)) + Fraction(float(running.low)) - exact) <= Fraction(2) ** -95
    assert float(running.total) == pytest.approx(float(exact), rel=2**-52, abs=2**-95)


@pytest.mark.parametrize("clipping_norm", [1e-3, 1e-6])
@pytest.mark.parametrize("sampler", ["floating-point", "discrete"])
def test_a_vector_is_no_longer_than_c_however_near_the_centre_a_gradient_is(
    clipping_norm: float, sampler: str
) -> None:
    """Its norm by factors, a difference of numbers around 1e6, is then wrong."""
    audited = make_mechanism(clipping_norm=clipping_norm, sampler=sampler)
    random = torch.Generator().manual_seed(0)
    off = []
    for _ in range(50):
        residual, hidden = (torch.randn(1, 1, size, generator=random, dtype=torch.float64) for size in (2, 16))
        residual, hidden = residual / residual.norm(), 1000 * hidden / hidden.norm()
        apart = clipping_norm * torch.randn(2, 16, generator=random, dtype=torch.float64)
        gradient = HeadGradients(residual, hidden, (residual.mT @ hidden)[0] + apart)
        off.append(float(gradient.norms() / gradient.materialise().norm()))
        added = ClippedSum().add(gradient, clipping_norm, audited).total
        assert 0 < float(added.norm()) <= clipping_norm * (1 if sampler == "discrete" else 1 + 1e-15)
    assert min(off) < 1 - 1e-9


def test_the_discrete_sum_is_on_its_grid_below_c_and_the_same_in_any_order() -> None:
    audited = make_mechanism(clipping_norm=0.7, sampler="discrete")
    random = torch.Generator().manual_seed(3)
    residual = torch.randn(50, 2, ROWS, generator=random, dtype=torch.float64)
    records = HeadGradients(residual, torch.randn(50, 2, WIDTH, generator=random, dtype=torch.float64))

    def summed(order: list[int]) -> Tensor:
        running = ClippedSum()
        for i in order:
            running.add(HeadGradients(records.residual[[i]], records.hidden[[i]]), 0.7, audited)
        return running.total

    total = summed(list(range(50)))
    assert torch.equal(total, summed(list(reversed(range(50)))))
    step = 2.0**-21  # 2 ** floor(log2 0.7) / 2 ** 20
    assert torch.equal(total / step, (total / step).round())
    exact = ClippedSum().add(records, 0.7, make_mechanism(clipping_norm=0.7)).total
    assert torch.allclose(total, exact, atol=50 * step)
    for i in range(50):
        assert float(summed([i]).norm()) <= 0.7
    noise = audited.noise((3, 4))
    assert np.array_equal(noise / step, np.round(noise / step))
