"""How much the texts of a set repeat one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np


def distinct_n(texts: Iterable[str], n: int) -> float:
    """Different word n-grams over all word n-grams of all texts (Li et al. 2016); 1 where there are none."""
    grams = [gram for text in texts for gram in _grams(text.casefold().split(), n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def self_bleu(texts: Sequence[str], highest: int = 4) -> float:
    """Mean BLEU of each text against all others (Zhu et al. 2018): 1 for copies, near 0 with nothing in common.

    Modified n-gram precisions for n up to `highest`, 0.1 in place of a count of zero, no brevity penalty.
    (So copies of texts with fewer words than `highest` stay below 1.)
    """
    words = [text.casefold().split() for text in texts]
    if len(words) < 2:
        return 0.0
    logs = np.zeros(len(words))
    for n in range(1, highest + 1):
        counts = [Counter(_grams(each, n)) for each in words]
        # The two highest counts of each n-gram: a text's own is not to be matched with itself.
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
            logs[i] += np.log(max(matched, 0.1) / max(1, count.total())) / highest
    return float(np.exp(logs).mean())


def near_duplicates(texts: Sequence[str], share: float, n: int = 3) -> list[bool]:
    """Which texts have a near twin before them, with more than `share` of both texts' word n-grams in common.

    Texts that such a twin made drop out are no twins of others, so that of a chain every second one stays.
    """
    holders: dict[tuple[str, ...], list[int]] = {}
    sets, found = [], []
    for i, text in enumerate(texts):
        ours = set(_grams(text.casefold().split(), n))
        common = Counter(j for gram in ours for j in holders.get(gram, []))
        twin = any(count > share * (len(ours) + len(sets[j]) - count) for j, count in common.items())
        sets.append(ours)
        found.append(twin)
        if not twin:
            for gram in ours:
                holders.setdefault(gram, []).append(i)
    return found


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))
