"""Compare token rates with counts in plain Python, and check their sensitivity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.privacy.sensitivity import CONSTANT
from gradmm.target import token_rates
from gradmm.target.token_rates import (
    COMMON,
    MIN_FREQUENCY,
    RARE,
    TokenSums,
    document_frequencies,
    token_presence,
    token_weights,
)

VOCABULARY = 9
INSTRUCTION = "a bad day :\n"

#: As read from the table of the target space, and as computed; the last two are too common to have a weight.
FREQUENCIES = [
    torch.tensor([1e-5, 0.003, 0.01, 0.02, 0.03, 0.049, 0.001, COMMON, 0.7], dtype=dtype)
    for dtype in (torch.float32, torch.float64)
]

texts_of_tokens = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=6), min_size=1, max_size=8)
frequencies_of_tokens = st.sampled_from(FREQUENCIES)


def slow_rates(texts: list[list[int]], frequencies: torch.Tensor) -> list[float]:
    weights = [1 / math.sqrt(f + RARE) if f < COMMON else 0.0 for f in frequencies.double().tolist()]
    norms = [math.hypot(*(weights[token] for token in set(text))) or 1.0 for text in texts]
    return [
        sum((token in text) * weights[token] / norm for text, norm in zip(texts, norms, strict=True)) / len(texts)
        for token in range(VOCABULARY)
    ]


@given(texts=texts_of_tokens, frequencies=frequencies_of_tokens)
def test_every_text_has_a_vector_of_norm_one_at_most(texts: list[list[int]], frequencies: torch.Tensor) -> None:
    norms = token_presence(texts, token_weights(frequencies)).norm(dim=1)
    for norm, text in zip(norms.tolist(), texts, strict=True):
        weighty = any(token < VOCABULARY - 2 for token in text)
        expected = 1.0 if weighty else CONSTANT / math.sqrt(1 + CONSTANT**2)
        assert norm == pytest.approx(expected, abs=1e-15)


@given(texts=texts_of_tokens, frequencies=frequencies_of_tokens)
def test_a_texts_vector_has_the_same_bits_beside_any_other_texts(
    texts: list[list[int]], frequencies: torch.Tensor
) -> None:
    together = token_presence(texts, token_weights(frequencies))
    alone = torch.cat([token_presence([text], token_weights(frequencies)) for text in texts])
    assert torch.equal(together, alone)


@given(texts=texts_of_tokens, others=texts_of_tokens, frequencies=frequencies_of_tokens)
def test_sums_give_the_rates_and_the_numbers_of_records(
    texts: list[list[int]], others: list[list[int]], frequencies: torch.Tensor
) -> None:
    weights = token_weights(frequencies)
    sums = {1: token_presence(texts, weights).sum(dim=0), 0: token_presence(others, weights).sum(dim=0)}
    rates, counts, noise = TokenSums(sums, noise=2.0).class_rates()
    assert counts.tolist() == pytest.approx([len(texts), len(others)])
    for row, of_class in zip(rates.tolist(), (texts, others), strict=True):
        assert row == pytest.approx(slow_rates(of_class, frequencies))
    assert noise == pytest.approx(2.0 * math.sqrt(1 + CONSTANT**2))


@pytest.fixture(scope="module")
def texts(phi: LanguageModel) -> list[list[int]]:
    uniforms = np.random.default_rng(3).random((600, 4))
    allowed = allowed_tokens(phi, "any")
    return write_texts(phi, allowed, PromptCache(phi, INSTRUCTION), uniforms, len(phi.embeddings)).tolist()


def frequencies_of(phi: LanguageModel, texts: list[list[int]]) -> torch.Tensor:
    return document_frequencies(phi, allowed_tokens(phi, "any"), INSTRUCTION, texts)


def test_document_frequencies_are_those_of_a_slow_loop(phi: LanguageModel, texts: list[list[int]]) -> None:
    few, prompt, allowed = texts[:5], [*phi.prefix_ids, *phi.encode(INSTRUCTION)], allowed_tokens(phi, "any")
    expected = np.zeros(len(phi.embeddings))
    for text in few:
        absent = np.ones(len(phi.embeddings))
        for position in range(len(text)):
            ids = torch.tensor([[*prompt, *text[:position]]])
            logits = phi.model(input_ids=ids).logits[:, -1, allowed.ids].double()
            if position == 0:
                logits = allowed.first_logits(logits)
            absent[allowed.ids] *= 1 - logits[0].softmax(dim=0).numpy()
        expected += (1 - absent) / len(few)
    found = frequencies_of(phi, few)
    assert found.dtype == torch.float64
    assert found.numpy() == pytest.approx(np.maximum(expected, MIN_FREQUENCY), rel=1e-3, abs=1e-6)


def test_document_frequencies_are_those_of_counts_in_many_texts(
    phi: LanguageModel, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = frequencies_of(phi, texts).numpy()
    counts = np.bincount([token for text in texts for token in set(text)], minlength=len(found)) / len(texts)
    errors = np.sqrt(found * (1 - found) / len(texts))
    frequent = found > 0.01
    assert frequent.sum() > 20
    assert (np.abs(counts - found) < 4.5 * errors)[frequent].all()
    monkeypatch.setattr(token_rates, "LOGITS", 1)  # one text at a time
    assert frequencies_of(phi, texts).numpy() == pytest.approx(found, rel=1e-4)


def test_texts_of_one_token_have_frequencies(phi: LanguageModel) -> None:
    found, allowed = frequencies_of(phi, [[5], [7]]), allowed_tokens(phi, "any")
    ids = torch.tensor([[*phi.prefix_ids, *phi.encode(INSTRUCTION)]])
    logits = allowed.first_logits(phi.model(input_ids=ids).logits[:, -1, allowed.ids].double())
    expected = logits[0].softmax(dim=0).clamp_min(MIN_FREQUENCY)
    torch.testing.assert_close(found[allowed.ids], expected, rtol=1e-3, atol=1e-7)
