"""Texts written with a fitted tilt contain words at the released rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.settings import GenerationSettings, WordTiltSettings
from gradmm.generation.result import released_texts
from gradmm.generation.word_tilt import (
    MAX_TILT,
    WordTilt,
    correction,
    fit_word_tilt,
    tilt_of,
    word_tilt_table,
)
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.template import TokenisedTemplate
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.target.naive_bayes import NaiveBayes
from gradmm.target.token_rates import document_frequencies
from tests.conftest import examples

INSTRUCTION = "a bad day :\n"
TOKENS = 6
GENERATION = GenerationSettings(whole_sentences=False)


def public_rates(phi: LanguageModel) -> torch.Tensor:
    """The document frequencies of the model's own texts."""
    return document_frequencies(phi, allowed_tokens(phi, "english"), INSTRUCTION, texts_with(phi, None, 2000))


def texts_with(phi: LanguageModel, tilt: torch.Tensor | None, count: int, seed: int = 99) -> list[list[int]]:
    allowed = allowed_tokens(phi, "english")
    uniforms = np.random.default_rng(seed).random((count, TOKENS))
    ids = write_texts(phi, allowed, PromptCache(phi, INSTRUCTION), uniforms, tilt=tilt)
    return ids.tolist()


def release(public: torch.Tensor, changes: dict[int, float]) -> NaiveBayes:
    """Rates of records in which some tokens are more frequent than in public text, by a factor."""
    tilt = torch.zeros_like(public)
    for token, factor in changes.items():
        tilt[token] = math.log(factor)
    nothing = torch.zeros(2, len(public), dtype=torch.float64)
    return NaiveBayes(nothing, tilt, public, torch.eye(2).double(), torch.tensor([50.0, 50.0]).double(), 0.0)


def fit(
    phi: LanguageModel, template: TokenisedTemplate, naive_bayes: NaiveBayes, label: int = 0, **settings: Any
) -> WordTilt:
    chosen = WordTiltSettings(**{"iterations": 6, "texts": 400} | settings)
    return fit_word_tilt(phi, template, INSTRUCTION, label, naive_bayes, TOKENS, chosen, GENERATION, seed=3)


@pytest.fixture(scope="module")
def words(phi: LanguageModel) -> list[int]:
    """Some words inside a text, none of them rare."""
    allowed = allowed_tokens(phi, "english")
    rates = public_rates(phi)
    inside = [i for i in allowed.ids[~allowed.continues_word].tolist() if phi.decode([i]).startswith(" ")]
    return sorted(inside, key=lambda token: -float(rates[token]))[:12]


def test_texts_written_with_the_tilt_have_the_released_words(
    phi: LanguageModel, template: TokenisedTemplate, words: list[int]
) -> None:
    """The public rates are those of all classes' texts, so their ratios alone do not suffice for this one."""
    public = public_rates(phi)
    public[words] *= torch.tensor([3.0, 1 / 3, 1.0] * 4).double()
    naive_bayes = release(public, dict(zip(words, [4.0, 0.25] * 6, strict=True)))
    fitted = fit(phi, template, naive_bayes, texts=1000)
    assert set(fitted.tilt.nonzero()[:, 0].tolist()) == set(words)

    allowed = allowed_tokens(phi, "english")
    begins = torch.zeros(len(phi.embeddings), dtype=torch.bool)
    begins[allowed.ids[~allowed.continues_word]] = True

    def shares(tilt: torch.Tensor | None) -> torch.Tensor:
        counts = torch.zeros(len(phi.embeddings)).double()
        for text in texts_with(phi, tilt, 3000, seed=5):
            counts[sorted(set(text))] += 1
        return counts * begins / (counts * begins).sum()

    def error(tilt: torch.Tensor | None) -> float:
        return float((shares(tilt)[words] - fitted.wanted[words]).abs().sum())

    plain = fit(phi, template, naive_bayes, iterations=0)
    torch.testing.assert_close(plain.tilt, naive_bayes.pooled_log_ratios)
    assert error(fitted.tilt) < 0.3 * min(error(plain.tilt), error(None))
    before, after = fitted.distances
    assert after < before


def test_a_vocabulary_of_common_tokens_is_not_tilted(phi: LanguageModel, template: TokenisedTemplate) -> None:
    """None of its tokens has a rate."""
    fitted = fit(phi, template, release(torch.zeros(len(phi.embeddings), dtype=torch.float64), {}))
    assert not fitted.tilt.any()
    assert fitted.distances == (0.0, 0.0)


def test_a_strength_between_asks_for_rates_between(
    phi: LanguageModel, template: TokenisedTemplate, words: list[int]
) -> None:
    public = public_rates(phi)
    naive_bayes = release(public, {words[0]: 9.0})
    none, half, full = (fit(phi, template, naive_bayes, strength=s, iterations=0) for s in (0.0, 0.5, 1.0))
    ratio = half.wanted[words[0]] / half.wanted[words[1]] / (public[words[0]] / public[words[1]])
    assert float(ratio) == pytest.approx(3.0)
    assert not none.tilt.any()
    torch.testing.assert_close(none.wanted, none.before)
    assert float(full.wanted[words[0]]) > float(half.wanted[words[0]]) > float(none.wanted[words[0]])


def test_emphasis_asks_for_more_words_that_tell_a_class_in_texts_of_every_class(
    phi: LanguageModel, template: TokenisedTemplate, words: list[int]
) -> None:
    """By exp(emphasis |evidence|), with the evidence up to 2 nats, beside a word that tells nothing."""
    public = public_rates(phi)
    weights = torch.zeros(2, len(public), dtype=torch.float64)
    weights[0, words[:2]] = torch.tensor([1.0, -6.0]).double()
    weights[1, words[:2]] = torch.tensor([-0.5, 1.5]).double()
    naive_bayes = replace(release(public, {}), weights=weights)
    for label, (first, second) in {0: (1.0 + 0.5, -6.0 + 1.0), 1: (-0.5 + 0.5, 1.5 + 1.0)}.items():
        fitted = fit(phi, template, naive_bayes, label, emphasis=0.5, iterations=0)
        ratios = (fitted.wanted / public)[words] / (fitted.wanted / public)[words[2]]
        assert ratios[:2].log().tolist() == pytest.approx([first, second])
        assert ratios[2:].tolist() == pytest.approx([1.0] * len(words[2:]))


def test_the_fit_is_determined_by_the_seed_and_bounded(
    phi: LanguageModel, template: TokenisedTemplate, words: list[int]
) -> None:
    naive_bayes = release(public_rates(phi), {words[0]: 20.0, words[1]: 1e-9})
    first, again = (fit(phi, template, naive_bayes, texts=50) for _ in range(2))
    torch.testing.assert_close(first.tilt, again.tilt, rtol=0, atol=0)
    assert float(first.tilt.abs().max()) <= MAX_TILT


@examples(30)
@given(wanted=st.floats(0, 1e3), written=st.integers(0, 1000))
def test_a_correction_goes_towards_the_rate_that_is_wanted_and_no_further(wanted: float, written: int) -> None:
    change = float(correction(torch.tensor([wanted]).double(), torch.tensor([float(written)]).double()))
    assert change * (wanted - written) >= 0
    assert abs(change) <= abs(math.log((wanted + 0.5) / (written + 0.5))) + 1e-12


def test_the_table_holds_the_tilt(phi: LanguageModel, template: TokenisedTemplate, words: list[int]) -> None:
    fitted = fit(phi, template, release(public_rates(phi), {words[0]: 3.0, words[3]: 0.2}), texts=50)
    table = word_tilt_table(phi, 0, fitted)
    assert table["token"].tolist() == [phi.decode([token]) for token in table["token_id"]]
    assert table["wanted"].is_monotonic_decreasing
    both = pd.concat([table, word_tilt_table(phi, 1, fitted).assign(tilt=1.0)])
    torch.testing.assert_close(tilt_of(both, 0, len(phi.embeddings)), fitted.tilt, rtol=0, atol=0)
    assert not tilt_of(both.iloc[:0], 0, len(phi.embeddings)).any()


def test_released_texts_are_tokenised_as_their_readers_will(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    ids = torch.tensor([[*phi.encode(" good day"), -1, -1]])
    texts = released_texts(phi, template, ids)
    assert texts["text"].tolist() == ["good day"]
    assert texts["token_ids"].tolist() == [phi.encode("good day")]
