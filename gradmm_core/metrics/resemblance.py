"""Lengths, vocabulary, diversity and a map of synthetic texts and as many real ones. For the private report only.

All figures are of private data: a map places single records, and vocabularies tell which words they have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gradmm.metrics.diversity import distinct_n, self_bleu

#: Texts of either side that are compared, at most, and texts on the map.
MAX_COMPARED, MAX_MAPPED = 1000, 250

#: Most frequent words that place a text on the map.
MAP_WORDS = 2000


@dataclass(frozen=True)
class Side:
    """Figures of the texts of one side.

    Attributes:
        lengths: words of each text.
        vocabulary: number of distinct words.
        shared: share of the words, counted with repetitions, that the other side has too.
        distinct_2, self_bleu: see `gradmm.metrics.diversity`.
        places: coordinates of the first `MAX_MAPPED` texts on the map.
    """

    lengths: Int[np.ndarray, " texts"]
    vocabulary: int
    shared: float
    distinct_2: float
    self_bleu: float
    places: Float[np.ndarray, "mapped 2"]


@dataclass(frozen=True)
class Resemblance:
    """Equally many synthetic and real texts.

    Attributes:
        explained: share of the variance along each axis of the map.
    """

    synthetic: Side
    real: Side
    explained: tuple[float, float]


def resemblance(synthetic: Sequence[str], real: Sequence[str], seed: int) -> Resemblance:
    """Compare random samples of equal size: vocabulary and diversity depend on the number of texts.

    The map has the first two principal components of TF-IDF vectors of single words. Texts without two different
    words among them have no direction, and are all at 0.
    """
    generator = np.random.default_rng(seed)
    size = min(len(synthetic), len(real), MAX_COMPARED)
    sides = [[texts[int(i)] for i in generator.permutation(len(texts))[:size]] for texts in (synthetic, real)]
    words = [[_words(text) for text in side] for side in sides]
    known = [{word for text in side for word in text} for side in words]
    places, explained = _map([text for side in sides for text in side[:MAX_MAPPED]])
    first, second = (
        Side(
            lengths=np.array([len(text) for text in words[one]], dtype=np.int64),
            vocabulary=len(known[one]),
            shared=_share([word in known[other] for text in words[one] for word in text]),
            distinct_2=distinct_n(sides[one], 2),
            self_bleu=self_bleu(sides[one]),
            places=half,
        )
        for one, other, half in ((0, 1, places[: len(places) // 2]), (1, 0, places[len(places) // 2 :]))
    )
    return Resemblance(first, second, explained)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _share(flags: Sequence[bool]) -> float:
    return float(np.mean(flags)) if flags else 0.0


def _map(texts: Sequence[str]) -> tuple[Float[np.ndarray, "texts 2"], tuple[float, float]]:
    """Project texts onto the two directions in which their TF-IDF vectors vary most."""
    from sklearn.decomposition import PCA  # imported here: pages and reports do without scikit-learn
    from sklearn.feature_extraction.text import TfidfVectorizer

    nowhere = np.zeros((len(texts), 2)), (0.0, 0.0)
    if len({word for text in texts for word in _words(text)}) < 2 or len(texts) < 2:
        return nowhere
    vectorizer = TfidfVectorizer(token_pattern=r"\w+", max_features=MAP_WORDS, sublinear_tf=True)
    vectors = vectorizer.fit_transform(texts).toarray()  # pyright: ignore[reportAttributeAccessIssue]
    if np.ptp(vectors, axis=0).max() == 0:  # the same text over and over
        return nowhere
    components = PCA(n_components=2, svd_solver="full")
    places = components.fit_transform(vectors)
    first, second = components.explained_variance_ratio_.tolist()
    return places, (first, second)
