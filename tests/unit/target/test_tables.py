"""The sums of a release as a table, and back."""

from __future__ import annotations

import pytest
import torch

from gradmm.errors import InputError
from gradmm.target.probe import Moments
from gradmm.target.tables import matrix_of, moments_of, to_table, token_sums_of
from gradmm.target.token_rates import TokenSums

LABELS = [3, 1]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


GRADIENTS = {label: numbers(2, 5, seed=label) for label in LABELS}
MOMENTS = Moments({label: numbers(4, seed=10 + label) for label in LABELS}, numbers(4, 4, seed=20), 0.1, 0.2)
TOKENS = TokenSums({label: numbers(9, seed=30 + label) for label in LABELS}, 0.3)


def test_every_part_is_read_as_it_was_written() -> None:
    table = to_table(GRADIENTS, MOMENTS, TOKENS)
    for label in LABELS:
        torch.testing.assert_close(matrix_of(table, label).double(), GRADIENTS[label], atol=1e-6, rtol=0)
    moments, tokens = moments_of(table, LABELS, (0.1, 0.2)), token_sums_of(table, LABELS, 0.3)
    torch.testing.assert_close(moments.second_moment, MOMENTS.second_moment, atol=1e-6, rtol=0)
    for label in LABELS:
        torch.testing.assert_close(moments.class_sums[label], MOMENTS.class_sums[label], atol=1e-6, rtol=0)
        torch.testing.assert_close(tokens.sums[label], TOKENS.sums[label], atol=1e-6, rtol=0)
    assert list(moments.class_sums) == list(tokens.sums) == LABELS
    assert (moments.class_sum_noise, moments.second_moment_noise, tokens.noise) == (0.1, 0.2, 0.3)


def test_class_sums_alone_are_read_as_they_were_written() -> None:
    table = to_table(GRADIENTS, Moments(MOMENTS.class_sums, None, 0.1))
    assert set(table["part"].to_pylist()) == {"gradient", "class_sum"}
    moments = moments_of(table, LABELS, (0.1, None))
    assert moments.second_moment is None
    for label in LABELS:
        torch.testing.assert_close(moments.class_sums[label], MOMENTS.class_sums[label], atol=1e-6, rtol=0)


def test_a_release_of_other_classes_is_refused() -> None:
    table = to_table(GRADIENTS, MOMENTS, TOKENS)
    for labels in ([3], [3, 1, 2], [0, 1]):
        for read in (
            lambda each: moments_of(table, each, (0.1, 0.2)),
            lambda each: token_sums_of(table, each, 0.3),
        ):
            with pytest.raises(InputError, match=r"released for the labels \[1, 3\], and the classes are"):
                read(labels)
