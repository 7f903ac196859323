"""Measure whether the released texts repeat members' texts more than non-members' texts.

Each text is compared with equally many members (records that the target gradient was computed from) and
non-members (unused records from the same source): by its nearest neighbour in TF-IDF of character n-grams, the
longest common run of words, the longest common substring, and the word 8-grams in common (cf. Carlini et al. 2021,
2023). Non-members are the baseline, because unrelated English texts overlap too. Without memorisation, members and
non-members are exchangeable, and a text is equally often nearer to either.

Texts are compared in NFC and lower case, with each run of white space as one space. Words are `\\w+`, and every
punctuation mark is a word of its own: "it's", "It 's" -> it ' s. Results contain no text of a member or
non-member, but they are figures of private data, for the private report only.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.stats import binomtest
from sklearn import config_context
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import pairwise_distances_argmin_min

from gradmm.errors import InputError

#: Length in words of the n-grams whose overlap is counted.
NGRAM_WORDS = 8

#: Memory limit of a block of similarities, in MiB.
SIMILARITY_BLOCK = 128

#: Columns whose mean and maximum `summarise` gives.
MEASURED = [
    *(
        f"{measure}_{side}"
        for measure in ("nearest", "longest_run", "longest_substring", "ngram_overlap")
        for side in ("member", "non_member")
    ),
    "longest_run_any_member",
]


def compare_texts(
    texts: pd.DataFrame, members: Sequence[str], non_members: Sequence[str], seed: int
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Compare labelled texts with records, by `memorisation`: the rows and figures of the stage `memorisation`."""
    frame = memorisation(texts["text"].tolist(), members, non_members, seed)
    frame.insert(0, "id", texts["id"].tolist())
    return frame, summarise(frame)


def memorisation(
    texts: Sequence[str], members: Sequence[str], non_members: Sequence[str], seed: int
) -> pd.DataFrame:
    """Compare every released text with members and with non-members.

    The larger of the two sides is sampled down to the size of the smaller one, by `seed` and without replacement.
    `longest_run_any_member` and `copy_any_member` use all members. All measures are exact. Except for `nearest`,
    the time is linear in the lengths of all texts.

    Args:
        texts: the released texts.
        members: records that the target gradient was computed from.
        non_members: unused records from the same source.

    Returns:
        One row per text, in order. Each measure has the columns `<measure>_member` and `<measure>_non_member`:
        the largest cosine similarity of TF-IDF character n-grams (`nearest`, 0 to 1); the longest common run in
        words (`longest_run`) and in characters (`longest_substring`); the share of the text's distinct word
        8-grams that occur in a record (`ngram_overlap`; NaN for a text of fewer than 8 words); whether the text
        equals a record (`copy`). The last columns are `longest_run_any_member` and `copy_any_member`.

    Raises:
        InputError: without members or without non-members.
    """
    if not members or not non_members:
        raise InputError(
            f"{len(members)} members and {len(non_members)} non-members cannot be compared",
            "memorisation",
            "the comparison needs one of each",
        )
    released = [*map(_normalised, texts)]
    size = min(len(members), len(non_members))
    sides = {"member": _sample(members, size, seed), "non_member": _sample(non_members, size, seed)}

    words = [_words(text) for text in released]
    characters, runs = SuffixAutomaton(released), SuffixAutomaton(words)
    columns: dict[str, np.ndarray] = {}
    for side, nearest in zip(sides, _nearest(released, *sides.values()), strict=True):
        matches = runs.match_lengths(_words(text) for text in sides[side])
        columns[f"nearest_{side}"] = nearest
        columns[f"longest_run_{side}"] = _longest(matches)
        columns[f"longest_substring_{side}"] = _longest(characters.match_lengths(sides[side]))
        columns[f"ngram_overlap_{side}"] = _ngram_overlaps(words, matches)
        columns[f"copy_{side}"] = _copies(released, sides[side])
    # One by one: there may be very many.
    columns["longest_run_any_member"] = _longest(runs.match_lengths(_words(_normalised(text)) for text in members))
    columns["copy_any_member"] = _copies(released, map(_normalised, members))
    return pd.DataFrame(columns)


def summarise(frame: pd.DataFrame) -> dict[str, float | int | None]:
    """Summarise each measure, the copies, and whether the texts are nearer to members. None for no value.

    `share_nearer_member` counts a tie as a half. `sign_test_p` is two-sided and ignores ties; it is 1 if all texts
    tie. The test assumes that texts are independent given the records; for similar texts p is too small.
    """
    figures: dict[str, float | int | None] = {"texts": len(frame)}
    for name in MEASURED:
        values = frame[name].dropna()
        figures[f"{name}_mean"] = float(values.mean()) if len(values) else None
        figures[f"{name}_max"] = values.max().item() if len(values) else None
    figures["texts_with_ngrams"] = int(frame["ngram_overlap_member"].notna().sum())
    figures |= {
        "copies_of_members": int(frame["copy_member"].sum()),
        "copies_of_non_members": int(frame["copy_non_member"].sum()),
        "copies_of_any_member": int(frame["copy_any_member"].sum()),
    }
    to_member = int((frame["nearest_member"] > frame["nearest_non_member"]).sum())
    to_non_member = int((frame["nearest_member"] < frame["nearest_non_member"]).sum())
    ties = len(frame) - to_member - to_non_member
    figures["ties"] = ties
    figures["share_nearer_member"] = (to_member + ties / 2) / len(frame) if len(frame) else None
    if to_member + to_non_member:
        figures["sign_test_p"] = float(binomtest(to_member, to_member + to_non_member).pvalue)
    else:
        figures["sign_test_p"] = 1.0 if ties else None
    return figures


class SuffixAutomaton:
    """An index of all runs of symbols in some sequences, in space linear in their lengths (Blumer et al. 1985).

    A state represents the runs with the same set of end positions. The longest of them has `length` symbols.
    `link` is the state of their longest suffix that has further end positions. State 0 is the empty run.
    """

    def __init__(self, sequences: Sequence[Sequence[Hashable]]) -> None:
        self.sequences = sequences
        self.following: list[dict[Hashable, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        for sequence in sequences:
            state = 0
            for symbol in sequence:
                state = self._extend(state, symbol)

    def match_lengths(self, corpus: Iterable[Sequence[Hashable]]) -> list[list[int]]:
        """Compute, for each position in each sequence, the longest run ending there that is in `corpus`."""
        matched = self._longest_matches(corpus)
        lengths = []
        for sequence in self.sequences:
            state, ends = 0, []
            for symbol in sequence:
                state = self.following[state][symbol]
                ends.append(matched[state])
            lengths.append(ends)
        return lengths

    def _longest_matches(self, corpus: Iterable[Sequence[Hashable]]) -> list[int]:
        """Compute, for each state, the length of the longest run or suffix of a run that is in `corpus`."""
        following, link, length = self.following, self.link, self.length
        matched = [0] * len(length)
        for item in corpus:
            state = run = 0
            for symbol in item:
                longer = following[state].get(symbol)
                while longer is None and state:
                    state = link[state]
                    run = length[state]
                    longer = following[state].get(symbol)
                if longer is not None:
                    state = longer
                    run += 1
                    if run > matched[state]:
                        matched[state] = run
        shortest_first = sorted(range(1, len(length)), key=length.__getitem__)
        for state in reversed(shortest_first):  # a run's suffixes occur wherever it does
            if matched[state] and link[state]:
                matched[link[state]] = length[link[state]]
        for state in shortest_first:
            matched[state] = matched[state] or matched[link[state]]
        return matched

    def _extend(self, last: int, symbol: Hashable) -> int:
        if symbol in self.following[last]:  # the run occurs in an earlier sequence
            return self._of_length(last, symbol)
        new = self._add(self.length[last] + 1, {}, 0)
        state = last
        while state >= 0 and symbol not in self.following[state]:
            self.following[state][symbol] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._of_length(state, symbol)
        return new

    def _of_length(self, state: int, symbol: Hashable) -> int:
        """Return the state whose longest run is that of `state` plus `symbol`; split a state with longer runs."""
        whole = self.following[state][symbol]
        if self.length[whole] == self.length[state] + 1:
            return whole
        part = self._add(self.length[state] + 1, dict(self.following[whole]), self.link[whole])
        self.link[whole] = part
        while state >= 0 and self.following[state].get(symbol) == whole:
            self.following[state][symbol] = part
            state = self.link[state]
        return part

    def _add(self, length: int, following: dict[Hashable, int], link: int) -> int:
        self.length.append(length)
        self.following.append(following)
        self.link.append(link)
        return len(self.length) - 1


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).lower().split())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _sample(texts: Sequence[str], size: int, seed: int) -> list[str]:
    drawn = np.random.default_rng(seed).choice(len(texts), size, replace=False)
    return [_normalised(texts[int(row)]) for row in drawn]


def _nearest(texts: list[str], *sides: list[str]) -> list[Float[np.ndarray, " texts"]]:
    """Compute each text's largest similarity to each side. N-gram weights are shared by all texts and sides."""
    documents = [*texts, *(text for side in sides for text in side)]
    if not texts or not any(documents):  # scikit-learn rejects both
        return [np.zeros(len(texts)) for _ in sides]
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), lowercase=False).fit_transform(documents)
    nearest, start = [], len(texts)
    with config_context(working_memory=SIMILARITY_BLOCK):
        for side in sides:
            there = vectors[start : start + len(side)]
            _, distances = pairwise_distances_argmin_min(vectors[: len(texts)], there, metric="cosine")
            nearest.append(np.round(1 - distances, 9))  # makes ties exact, and a copy exactly 1
            start += len(side)
    return nearest


def _longest(match_lengths: list[list[int]]) -> Int[np.ndarray, " texts"]:
    return np.array([max(ends, default=0) for ends in match_lengths], dtype=np.int64)


def _ngram_overlaps(words: list[list[str]], match_lengths: list[list[int]]) -> Float[np.ndarray, " texts"]:
    return np.array([_ngram_overlap(*pair) for pair in zip(words, match_lengths, strict=True)], dtype=np.float64)


def _ngram_overlap(words: list[str], match_lengths: list[int]) -> float:
    """Compute the share of distinct 8-grams that are matched, which end where a match of at least 8 words ends."""
    ends = range(NGRAM_WORDS, len(words) + 1)
    matched = {tuple(words[end - NGRAM_WORDS : end]): match_lengths[end - 1] >= NGRAM_WORDS for end in ends}
    return sum(matched.values()) / len(matched) if matched else math.nan


def _copies(texts: list[str], records: Iterable[str]) -> Bool[np.ndarray, " texts"]:
    copied = set(texts).intersection(records)
    return np.array([text in copied for text in texts], dtype=np.bool_)
