"""Diversity of a set of texts: distinct-n, self-BLEU and near duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gradmm.metrics.words import words


def distinct_n(texts: Iterable[str], n: int) -> float:
    """Return the share of distinct word n-grams among all n-grams (Li et al. 2016); 1 if there are none."""
    grams = [gram for text in texts for gram in _grams(words(text.casefold()), n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def self_bleu(texts: Sequence[str], max_n: int = 4) -> float:
    """Return the mean BLEU of each text against all others (Zhu et al. 2018): 1 for copies, near 0 if unrelated.

    Uses modified n-gram precisions for n up to `max_n`, replaces a count of zero by 0.1, and has no brevity
    penalty. Copies of texts with fewer than `max_n` words therefore score below 1.
    """
    split = [words(text.casefold()) for text in texts]
    if len(split) < 2:
        return 0.0
    logs = np.zeros(len(split))
    for n in range(1, max_n + 1):
        counts = [Counter(_grams(each, n)) for each in split]
        # The two highest counts of each n-gram, so that a text is not matched with itself.
        best: Counter = Counter()
        second: Counter = Counter()
        for count in counts:
            for gram, times in count.items():
                if times > best[gram]:
                    best[gram], second[gram] = times, best[gram]
                else:
                    second[gram] = max(second[gram], times)
        for i, count in enumerate(counts):
            matched = sum(
                min(times, second[gram] if times == best[gram] else best[gram]) for gram, times in count.items()
            )
            logs[i] += np.log(max(matched, 0.1) / max(1, count.total())) / max_n
    return float(np.exp(logs).mean())


def near_duplicates(texts: Sequence[str], share: float, n: int = 3) -> list[bool]:
    """Flag texts whose word n-grams have a Jaccard similarity above `share` with an earlier unflagged text.

    Flagged texts are not compared with later ones, so every second text of a chain stays.
    """
    holders: dict[tuple[str, ...], list[int]] = {}
    sets, flags = [], []
    for i, text in enumerate(texts):
        grams = set(_grams(words(text.casefold()), n))
        common = Counter(j for gram in grams for j in holders.get(gram, []))
        duplicate = any(count > share * (len(grams) + len(sets[j]) - count) for j, count in common.items())
        sets.append(grams)
        flags.append(duplicate)
        if not duplicate:
            for gram in grams:
                holders.setdefault(gram, []).append(i)
    return flags


def _grams(split: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(split[i:] for i in range(n)), strict=False))
