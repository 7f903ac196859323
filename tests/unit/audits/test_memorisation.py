"""Memorisation: planted copies are found, measures equal brute force, and chance gives no finding."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.audits.memorisation import MEASURED, SuffixAutomaton, memorisation, summarise
from gradmm.errors import InputError
from tests.conftest import examples

VOCABULARY = [
    "the", "a", "film", "plot", "cast", "is", "was", "dull", "warm", "and",
    "of", "not", "funny", "slow", "score", "with", "its", "long", "ending", "best",
]  # fmt: skip

#: Few symbols, so that long runs occur by chance; one is beyond the Basic Multilingual Plane.
strings = st.text("ab😀", max_size=14)
sentences = st.lists(st.sampled_from(["ab", "b", "ß", ","]), max_size=14).map(" ".join)


def longest_common_run(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Compute the length of the longest common substring by dynamic programming."""
    best, previous = 0, [0] * (len(second) + 1)
    for symbol in first:
        current = [0]
        for j, other in enumerate(second):
            current.append(previous[j] + 1 if symbol == other else 0)
        best, previous = max(best, *current), current
    return best


def ngrams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}


def random_texts(rng: np.random.Generator, count: int, words: int = 12) -> list[str]:
    return [" ".join(rng.choice(VOCABULARY, words)) for _ in range(count)]


def swapped(frame: pd.DataFrame) -> pd.DataFrame:
    """Exchange the names of the two sides."""
    names = {c: c.replace("_non_member", "_member") for c in frame.columns if c.endswith("_non_member")}
    return frame.rename(columns=names | {new: old for old, new in names.items()})[frame.columns]


def known(frame: pd.DataFrame) -> dict[str, float]:
    """Return the figures that have a value."""
    return {name: value for name, value in summarise(frame).items() if value is not None}


def chars_of_words(text: str) -> Counter[str]:
    """Count n-grams of 3 to 5 characters within words that are padded by a space on either side."""
    counts: Counter[str] = Counter()
    for word in text.split():
        padded = f" {word} "
        for n in (3, 4, 5):
            counts.update(padded[i : i + n] for i in range(max(len(padded) - n + 1, 0)))
    return counts


@examples(300)
@given(st.lists(strings, max_size=6), st.lists(strings, max_size=6))
def test_match_lengths_equal_brute_force(sequences: list[str], corpus: list[str]) -> None:
    lengths = SuffixAutomaton(sequences).match_lengths(corpus)
    for sequence, ends in zip(sequences, lengths, strict=True):
        for end, length in enumerate(ends, start=1):
            held = [n for n in range(end + 1) if any(sequence[end - n : end] in item for item in corpus)]
            assert length == max(held, default=0)


@given(strings, st.lists(strings, min_size=1, max_size=4), st.lists(strings, max_size=4))
def test_longest_match_is_the_longest_common_substring(text: str, corpus: list[str], others: list[str]) -> None:
    ends = SuffixAutomaton([*others, text, *others]).match_lengths(corpus)[len(others)]
    assert max(ends, default=0) == max(longest_common_run(text, item) for item in corpus)


@given(st.lists(strings, max_size=4))
def test_automaton_is_linear_in_size_and_reusable(sequences: list[str]) -> None:
    automaton = SuffixAutomaton(sequences)
    assert len(automaton.length) <= 2 * sum(map(len, sequences)) + 1
    for length, link in zip(automaton.length[1:], automaton.link[1:], strict=True):
        assert automaton.length[link] < length  # every state represents a run
    everything = [list(range(1, len(sequence) + 1)) for sequence in sequences]
    assert automaton.match_lengths(sequences) == everything
    assert automaton.match_lengths([]) == [[0] * len(sequence) for sequence in sequences]
    assert automaton.match_lengths(iter(sequences)) == everything


@examples(60)
@given(
    st.lists(sentences, max_size=4),
    st.lists(sentences, min_size=1, max_size=3),
    st.lists(sentences, min_size=1, max_size=3),
)
def test_frame_equals_brute_force_for_sides_of_equal_size(
    texts: list[str], members: list[str], non_members: list[str]
) -> None:
    size = min(len(members), len(non_members))
    members, non_members = members[:size], non_members[:size]
    frame = memorisation(texts, members, non_members, seed=0)
    for side, records in (("member", members), ("non_member", non_members)):
        for row, text in zip(frame.to_dict("records"), texts, strict=True):
            words = text.split()
            assert row[f"longest_run_{side}"] == max(longest_common_run(words, r.split()) for r in records)
            assert row[f"longest_substring_{side}"] == max(longest_common_run(text, r) for r in records)
            assert row[f"copy_{side}"] == (text in records)
            known = set.union(*(ngrams(r.split()) for r in records))
            overlap = row[f"ngram_overlap_{side}"]
            if len(words) < 8:
                assert math.isnan(overlap)
            else:
                assert overlap == pytest.approx(len(ngrams(words) & known) / len(ngrams(words)))
    assert frame["longest_run_any_member"].tolist() == frame["longest_run_member"].tolist()
    assert frame["copy_any_member"].tolist() == frame["copy_member"].tolist()


def test_nearest_is_the_cosine_of_tf_idf_vectors() -> None:
    rng = np.random.default_rng(1)
    texts, members, non_members = (random_texts(rng, count, words=5) for count in (4, 3, 3))
    frame = memorisation(texts, members, non_members, seed=0)
    documents = [*texts, *members, *non_members]
    counts = {text: chars_of_words(text) for text in documents}
    holding = Counter(gram for text in documents for gram in counts[text])

    def vector(text: str) -> dict[str, float]:
        weights = {
            gram: count * (math.log((1 + len(documents)) / (1 + holding[gram])) + 1)
            for gram, count in counts[text].items()
        }
        norm = math.hypot(*weights.values())
        return {gram: weight / norm for gram, weight in weights.items()}

    for side, records in (("member", members), ("non_member", non_members)):
        for text, nearest in zip(texts, frame[f"nearest_{side}"], strict=True):
            here = vector(text)
            cosines = [sum(here.get(g, 0) * w for g, w in vector(record).items()) for record in records]
            assert nearest == pytest.approx(max(cosines), abs=1e-8)


def test_planted_copies_are_found() -> None:
    rng = np.random.default_rng(0)
    members, non_members = random_texts(rng, 40, words=20), random_texts(rng, 40, words=20)
    secret = "Mrs Ada Byron of 12 Saint James's Square called about her results"  # 14 words: james, ', s
    members[17] = secret
    phrase = "of 12 saint james's square"
    texts = [
        "  mrs ada BYRON of 12 Saint\tJames's Square called about her results",
        f"dull plot , {secret} and a slow ending",
        "warm film Byron of 12 Saint James's Square long cast",  # 8 words of it
        f"well {phrase} again",  # 7 words of it
        random_texts(rng, 1)[0],
    ]
    frame = memorisation(texts, members, non_members, seed=0)
    assert frame["copy_member"].tolist() == frame["copy_any_member"].tolist() == [True, False, False, False, False]
    assert not frame["copy_non_member"].any()
    assert frame["longest_run_member"].tolist()[:4] == [14, 14, 8, 7]
    assert frame["longest_run_non_member"].max() <= 4
    assert frame["longest_substring_member"].tolist()[0] == len(secret)
    assert frame["longest_substring_member"].tolist()[3] == len(f" {phrase} ")
    assert frame["nearest_member"].tolist()[0] == 1.0
    assert (frame["nearest_member"] > frame["nearest_non_member"])[:3].all()
    overlap = frame["ngram_overlap_member"].tolist()
    assert overlap[0] == 1.0
    assert overlap[1] == pytest.approx(7 / 14)  # 21 words
    assert overlap[2] == pytest.approx(1 / 5)  # 12 words
    assert overlap[3:] == [0.0, 0.0]
    assert (frame["ngram_overlap_non_member"] == 0).all()
    figures = summarise(frame)
    assert figures["copies_of_members"] == figures["copies_of_any_member"] == 1
    assert figures["longest_run_member_max"] == 14
    assert figures["longest_run_non_member_max"] == frame["longest_run_non_member"].max()


def test_sign_test_detects_copies_of_members_and_not_independent_texts() -> None:
    rng = np.random.default_rng(2)
    members, non_members = random_texts(rng, 300), random_texts(rng, 300)
    independent = known(memorisation(random_texts(rng, 300), members, non_members, seed=0))
    assert independent["share_nearer_member"] == pytest.approx(0.5, abs=0.08)
    assert independent["sign_test_p"] > 0.01
    leaking = [" ".join([*m.split()[:11], "new"]) for m in members[:30]]
    figures = known(memorisation(leaking, members, non_members, seed=0))
    assert figures["share_nearer_member"] > 0.9
    assert figures["sign_test_p"] < 1e-5


def test_sign_test_rejects_independent_texts_at_about_its_level() -> None:
    rng = np.random.default_rng(3)
    p_values = [
        known(memorisation(random_texts(rng, 20), random_texts(rng, 20), random_texts(rng, 20), seed=0))[
            "sign_test_p"
        ]
        for _ in range(40)
    ]
    assert sum(p < 0.05 for p in p_values) <= 7  # more has probability 0.1% for an exact test


@pytest.mark.parametrize(("members", "non_members"), [(30, 30), (12, 30), (30, 12)])
def test_exchanging_members_and_non_members_exchanges_the_columns(members: int, non_members: int) -> None:
    rng = np.random.default_rng(4)
    texts, first, second = (random_texts(rng, count) for count in (10, members, non_members))
    texts[0] = first[0]
    common = [name for name in memorisation(texts, first, second, seed=1).columns if "_any_" not in name]
    there = memorisation(texts, first, second, seed=1)[common]
    pd.testing.assert_frame_equal(swapped(memorisation(texts, second, first, seed=1)[common]), there)
    share = known(memorisation(texts, first, second, seed=1))["share_nearer_member"]
    assert share + known(memorisation(texts, second, first, seed=1))["share_nearer_member"] == 1


def test_larger_side_is_sampled_down_and_all_members_are_still_searched() -> None:
    rng = np.random.default_rng(5)
    members, non_members = random_texts(rng, 60), random_texts(rng, 15)
    texts = members  # each is a copy of a member
    frame = memorisation(texts, members, non_members, seed=7)
    assert frame["copy_any_member"].all()
    assert (frame["longest_run_any_member"] == 12).all()
    for seed in range(5):
        assert memorisation(texts, members, non_members, seed)["copy_member"].sum() == 15
    pd.testing.assert_frame_equal(memorisation(texts, members, non_members, seed=7), frame)
    assert (
        memorisation(texts, members, non_members, seed=8)["copy_member"].tolist() != frame["copy_member"].tolist()
    )
    assert memorisation(non_members, non_members, members, seed=7)["copy_member"].all()  # the smaller side


def test_texts_are_compared_in_lower_case_nfc_and_single_spaces() -> None:
    composed, decomposed = (
        "Caf\u00e9 \u00c5ngstr\u00f6m, na\u00efve \U0001f600!",
        "cafe\u0301 a\u030angstro\u0308m,  nai\u0308ve\n\U0001f600!",
    )
    frame = memorisation([composed], [decomposed], ["something else"], seed=0)
    row = frame.iloc[0]
    assert row["copy_member"]
    assert row["nearest_member"] == 1.0
    assert row["longest_run_member"] == 6  # with the comma, the emoji and the exclamation mark
    assert row["longest_substring_member"] == len(composed)


def test_punctuation_is_separate_from_words_with_or_without_spaces() -> None:
    frame = memorisation(["It's fine, really."], ["it 's fine , really ."], ["no"], seed=0)
    assert frame["longest_run_member"].tolist() == [7]
    assert frame["copy_member"].tolist() == [False]


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    frame = memorisation(["我喜欢这部电影的结尾"], ["他说这部电影的开头"], ["天气很好"], seed=0)
    assert frame["longest_substring_member"].tolist() == [5]
    assert frame["longest_run_member"].tolist() == [0]


def test_copy_is_nearest_at_exactly_one() -> None:
    texts = random_texts(np.random.default_rng(8), 200)
    assert (memorisation(texts, texts, ["new"] * 200, seed=0)["nearest_member"] == 1).all()


def test_a_run_does_not_span_two_records() -> None:
    texts = ["one two three four", "five one"]
    frame = memorisation(texts, ["one two", "three four five"], ["x", "y"], seed=0)
    assert frame["longest_run_member"].tolist() == [2, 1]


def test_frame_holds_numbers_only_and_the_summary_is_json() -> None:
    rng = np.random.default_rng(6)
    frame = memorisation(random_texts(rng, 5), random_texts(rng, 9), random_texts(rng, 7), seed=0)
    assert {str(kind) for kind in frame.dtypes} == {"float64", "int64", "bool"}
    assert set(MEASURED) == {name for name in frame.columns if not name.startswith("copy_")}
    figures = summarise(frame)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert all(type(value) in (int, float) for value in figures.values())


@pytest.mark.parametrize("texts", [[], ["", "  \n"]])
@pytest.mark.parametrize("records", [["a film"], [""]])
def test_empty_texts_or_records_give_no_finding(texts: list[str], records: list[str]) -> None:
    frame = memorisation(texts, records, records, seed=0)
    assert frame.dtypes.equals(memorisation(["a"], ["a"], ["b"], seed=0).dtypes)
    assert len(frame) == len(texts)
    assert (frame[["nearest_member", "longest_run_member", "longest_substring_member"]] == 0).all(axis=None)
    assert frame["ngram_overlap_member"].isna().all()
    figures = summarise(frame)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["ngram_overlap_member_mean"] is None
    if texts:
        assert (figures["share_nearer_member"], figures["sign_test_p"], figures["ties"]) == (0.5, 1.0, 2)
    else:
        assert (figures["share_nearer_member"], figures["sign_test_p"], figures["ties"]) == (None, None, 0)


def test_ties_count_half_and_are_excluded_from_the_sign_test() -> None:
    members, non_members = ["warm film", "dull plot"], ["warm film", "slow score"]
    figures = summarise(memorisation(["warm film", "dull plot", "zzz"], members, non_members, seed=0))
    assert figures["ties"] == 2
    assert figures["share_nearer_member"] == pytest.approx(2 / 3)
    assert figures["sign_test_p"] == 1.0  # one text of one
    assert figures["copies_of_members"] == 2
    assert figures["copies_of_non_members"] == 1


def test_summary_averages_the_overlap_over_texts_with_ngrams() -> None:
    record = " ".join(VOCABULARY[:10])
    frame = memorisation([record, "too short"], [record], ["another one"], seed=0)
    assert frame["ngram_overlap_member"].isna().tolist() == [False, True]
    figures = summarise(frame)
    assert (figures["texts"], figures["texts_with_ngrams"]) == (2, 1)
    assert (figures["ngram_overlap_member_mean"], figures["ngram_overlap_non_member_mean"]) == (1.0, 0.0)


@pytest.mark.parametrize(("members", "non_members"), [([], ["a"]), (["a"], []), ([], [])])
def test_a_missing_side_is_refused_without_quoting_texts(members: list[str], non_members: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        memorisation(["a text"], members, non_members, seed=0)
    assert str(refused.value) == (
        f"memorisation: {len(members)} members and {len(non_members)} non-members cannot be compared; "
        "the comparison needs one of each"
    )
