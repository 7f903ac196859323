"""Compare token rates with counts in plain Python, and check their sensitivity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.privacy.sensitivity import CONSTANT
from gradmm.target.token_rates import TokenSums, mean_rates, token_presence

VOCABULARY = 9

texts_of_tokens = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=6), min_size=1, max_size=8)


def slow_rates(texts: list[list[int]]) -> list[float]:
    return [
        sum((token in text) / math.sqrt(len(set(text)) or 1) for text in texts) / len(texts)
        for token in range(VOCABULARY)
    ]


@given(texts=texts_of_tokens)
def test_every_text_has_a_vector_of_norm_one_at_most(texts: list[list[int]]) -> None:
    norms = token_presence(texts, VOCABULARY).norm(dim=1)
    for norm, text in zip(norms.tolist(), texts, strict=True):
        expected = 1.0 if text else CONSTANT / math.sqrt(1 + CONSTANT**2)
        assert norm == pytest.approx(expected, abs=1e-15)


@given(texts=texts_of_tokens)
def test_a_texts_vector_has_the_same_bits_beside_any_other_texts(texts: list[list[int]]) -> None:
    together = token_presence(texts, VOCABULARY)
    alone = torch.cat([token_presence([text], VOCABULARY) for text in texts])
    assert torch.equal(together, alone)


@given(texts=texts_of_tokens)
def test_rates_are_means_over_texts(texts: list[list[int]]) -> None:
    assert mean_rates(texts, VOCABULARY).tolist() == pytest.approx(slow_rates(texts))


@given(texts=texts_of_tokens, others=texts_of_tokens)
def test_sums_give_the_rates_and_the_numbers_of_records(texts: list[list[int]], others: list[list[int]]) -> None:
    sums = {1: token_presence(texts, VOCABULARY).sum(dim=0), 0: token_presence(others, VOCABULARY).sum(dim=0)}
    rates, counts, noise = TokenSums(sums, noise=2.0).class_rates()
    assert counts.tolist() == pytest.approx([len(texts), len(others)])
    for row, of_class in zip(rates.tolist(), (texts, others), strict=True):
        assert row == pytest.approx(slow_rates(of_class))
    assert noise == pytest.approx(2.0 * math.sqrt(1 + CONSTANT**2))


def test_many_texts_have_the_same_rates_as_their_parts() -> None:
    texts = [[number % VOCABULARY, number % 4] for number in range(700)]
    assert mean_rates(texts, VOCABULARY).tolist() == pytest.approx(slow_rates(texts))
