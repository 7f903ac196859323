"""Diversity figures, compared with direct counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.metrics.diversity import distinct_n, near_duplicates, self_bleu
from gradmm.metrics.words import words
from tests.conftest import examples

#: Few words, so that n-grams repeat within and between texts.
sentences = st.lists(st.sampled_from(["a", "B", "b", "c"]), max_size=8).map(" ".join)
collections = st.lists(sentences, max_size=7)


def grams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


@examples(300)
@given(texts=collections, share=st.floats(0.01, 1), n=st.integers(1, 3))
def test_near_duplicates_equal_a_comparison_of_every_pair(texts: list[str], share: float, n: int) -> None:
    stay: list[set] = []
    expected = []
    for text in texts:
        own = set(grams(text, n))
        # A flagged text does not flag others.
        duplicate = any(len(own & other) > share * len(own | other) for other in stay)
        expected.append(duplicate)
        if not duplicate:
            stay.append(own)
    assert near_duplicates(texts, share, n) == expected


def test_of_a_chain_of_near_duplicates_every_second_one_stays() -> None:
    words = [f"w{i}" for i in range(30)]
    chain = [" ".join(words[start : start + 14]) for start in range(0, 12, 3)]  # neighbours share 9 of 15 trigrams
    assert near_duplicates(chain, 0.55) == [False, True, False, True]
    assert near_duplicates(chain, 0.65) == [False] * 4


def test_texts_without_a_trigram_and_half_shared_ones_are_no_near_duplicates() -> None:
    assert near_duplicates(["so good", "so good", ""], 0.5) == [False] * 3
    assert near_duplicates(["a b c d", "a b c x y"], 0.25) == [False, False]  # just 1 of 4
    assert near_duplicates(["a b c d", "A  b C x y"], 0.24) == [False, True]
    assert near_duplicates(["a b c", "a b c"], 1.0) == [False, False]


@given(texts=collections, n=st.integers(1, 3))
def test_distinct_n_counts_every_gram_of_all_texts_once(texts: list[str], n: int) -> None:
    every = [gram for text in texts for gram in grams(text, n)]
    assert distinct_n(texts, n) == (pytest.approx(len(set(every)) / len(every)) if every else 1.0)
    if every:
        assert distinct_n(texts * 3, n) == pytest.approx(distinct_n(texts, n) / 3)


def test_distinct_n_of_texts_with_nothing_and_with_everything_in_common() -> None:
    assert distinct_n(["the soup was warm", "a quiet room"], 2) == 1.0
    assert distinct_n(["the soup", "The  SOUP", "the soup", "the soup"], 2) == 0.25
    assert distinct_n(["one"], 2) == 1.0  # no bigrams


def slow_bleu(text: str, others: list[str], max_n: int) -> float:
    log = 0.0
    for n in range(1, max_n + 1):
        own = grams(text, n)
        references = [grams(other, n) for other in others]
        matched = sum(min(own.count(g), max(r.count(g) for r in references)) for g in set(own))
        log += math.log((matched or 0.1) / (len(own) or 1)) / max_n
    return math.exp(log)


@examples(200)
@given(texts=st.lists(sentences, min_size=2, max_size=6), max_n=st.integers(1, 4))
def test_self_bleu_is_the_mean_over_each_text_against_all_others(texts: list[str], max_n: int) -> None:
    scores = [slow_bleu(text, texts[:i] + texts[i + 1 :], max_n) for i, text in enumerate(texts)]
    assert self_bleu(texts, max_n) == pytest.approx(sum(scores) / len(scores))


def test_self_bleu_is_one_for_copies_and_small_with_nothing_in_common() -> None:
    assert self_bleu(["the soup was warm and fresh"] * 3) == pytest.approx(1.0)
    assert self_bleu(["the soup was warm", "The  soup WAS warm"]) == pytest.approx(1.0)
    assert self_bleu(["the soup was warm and fresh", "never a quiet room with light"]) < 0.05
    assert self_bleu(["alone"]) == 0.0
    assert self_bleu([]) == 0.0


@pytest.mark.parametrize("end", ["。", "!"])
def test_texts_without_spaces_are_near_duplicates_too(end: str) -> None:
    texts = ["这部电影非常好看，演员很棒。", f"这部电影非常好看，演员很棒{end}了", "味道不错，下次还会再来。"]
    assert near_duplicates(texts, 0.5) == [False, True, False]
    assert distinct_n(texts, 2) < 1


@given(text=st.text(st.characters(max_codepoint=0x0DFF)))
def test_words_of_scripts_with_spaces_are_those_between_spaces(text: str) -> None:
    assert words(text) == text.split()
