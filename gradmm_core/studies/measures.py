"""Figures of an arm's texts without fine-tuning: fluency, diversity, and distances from real texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from gradmm.lm.classification import text_embeddings
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.perplexity import log_perplexities
from gradmm.lm.template import TokenisedTemplate, tokenise_readable
from gradmm.metrics.distribution import (
    at_equal_sizes,
    frechet_distance,
    half_sample_interval,
    mean_nearest_distance,
    squared_mmd,
)
from gradmm.metrics.diversity import distinct_n, self_bleu

#: Texts per forward pass.
BATCH_SIZE = 64

#: Random halves for the interval of a distance.
HALVES = 200

DISTANCES = {
    "frechet_distance": frechet_distance,
    "squared_mmd": squared_mmd,
    "nearest_distance": mean_nearest_distance,
}


@dataclass(frozen=True)
class TextReader:
    """Tokenises and embeds texts with one model. Those without tokens, which no model can read, are left out."""

    language_model: LanguageModel
    template: TokenisedTemplate

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, truncated at the template's maximum length."""
        tokens, _ = tokenise_readable(self.language_model.tokenizer, texts, self.template.max_text_tokens)
        return list(tokens)

    def embeddings(self, texts: Sequence[str]) -> Float[np.ndarray, "texts hidden"]:
        """The model's last hidden states after the template's suffix, in float64."""
        embedded = text_embeddings(self.language_model, self.template, self.tokens(texts), BATCH_SIZE)
        return embedded.double().numpy()


def text_measures(reader: TextReader, texts: Sequence[str], real: Sequence[str], seed: int) -> dict[str, float]:
    """Compute the columns `compare.MEASURES` of one arm's texts.

    Args:
        real: as many real texts of each class.
        seed: of the subsets where the numbers of texts differ after all.
    """
    embedded, embedded_real = reader.embeddings(texts), reader.embeddings(real)
    return {
        "log_perplexity": float(pd.Series(log_perplexities(reader.language_model, reader.tokens(texts))).mean()),
        "distinct_2": distinct_n(texts, 2),
        "self_bleu": self_bleu(texts),
        "frechet_distance": at_equal_sizes(frechet_distance, embedded, embedded_real, [seed])[0],
        "squared_mmd": at_equal_sizes(squared_mmd, embedded, embedded_real, [seed])[0],
        "nearest_distance": mean_nearest_distance(embedded, embedded_real),
    }


def distance_intervals(
    embedded: Float[np.ndarray, "texts hidden"], real: Float[np.ndarray, "rows hidden"]
) -> dict[str, float]:
    """Compute columns `<distance>_low` and `<distance>_high`: 95% of each distance between random halves."""
    intervals = {}
    for name, distance in DISTANCES.items():
        low, high = half_sample_interval(distance, embedded, real, range(HALVES))
        intervals |= {f"{name}_low": low, f"{name}_high": high}
    return intervals
