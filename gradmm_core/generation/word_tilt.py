"""Fit a tilt of words: with it, the model's texts contain words as often as the records of a class do.

Words that distinguish a class are made likelier than that, in texts of every class: a student learns little
about a word that hardly any text contains. With r_cv and u_v as in `gradmm.target.naive_bayes`, the wanted rate of
word v in texts of class c is proportional to

    u_v (r_cv / u_v)^strength exp(strength emphasis min(max_k |log(r_kv / r_v)|, MAX_EVIDENCE))

A tilt b is added to the logits of the tokens that begin a word. Of all changes of a distribution that meet given
rates of tokens, such exponential tilting has the smallest relative entropy (Csiszar 1975). Which b meets them has
no closed form here: a text's later words depend on its earlier ones, and a likelier word displaces the others. So
b is found by iterative scaling (Darroch & Ratcliff 1972): texts are written, their words counted, and

    b_v  <-  b_v + n / (n + CAUTION) * log((wanted_v + 1/2) / (written_v + 1/2))

where wanted_v and written_v are the expected and the observed numbers of texts with token v, and n the larger of
the two: few texts say little about a rare word. The first b is the logarithm of the released rates over those of
the model itself.

All of it is post-processing of the release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import trange

from gradmm.config.settings import ClassSettings, GenerationSettings, TargetGradientSettings, WordTiltSettings
from gradmm.generation.result import released_texts
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.sentences import SentenceEnds
from gradmm.lm.template import TokenisedTemplate
from gradmm.lm.token_passes import ComputeMeter
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.storage.artifacts import StageOutput
from gradmm.target.matched_target import released_naive_bayes
from gradmm.target.naive_bayes import NaiveBayes

#: A token whose rate differs by less than this (nats) from the model's own is not tilted: the release has no
#: evidence about it.
EVIDENCE = 0.02

#: Largest evidence of a word (nats) that its emphasis counts.
MAX_EVIDENCE = 2.0

#: Number of texts with a token at which its correction is halved.
CAUTION = 3.0

#: Largest absolute value of a tilt, in nats.
MAX_TILT = 8.0

#: Distinguishes the random numbers of these texts from those of released ones.
STREAM = 7


@dataclass(frozen=True, eq=False)
class WordTilt:
    """A tilt, and shares of the words in texts; float64, on the CPU.

    Attributes:
        tilt: zero for tokens that do not begin a word, and for those without evidence.
        wanted: share of each token among all tokens that begin words and have a rate, as released, with emphasis.
        written: the same in the last texts that the tilt was corrected by; in the model's own without any.
        before: the same in the model's own texts.
    """

    tilt: Float[Tensor, " vocabulary"]
    wanted: Float[Tensor, " vocabulary"]
    written: Float[Tensor, " vocabulary"]
    before: Float[Tensor, " vocabulary"]

    @property
    def distances(self) -> tuple[float, float]:
        """Total variation distance of the words from those wanted, before and after; in the last, of few texts."""
        before, written = ((shares - self.wanted).abs().sum() / 2 for shares in (self.before, self.written))
        return float(before), float(written)


def fit_word_tilts(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    target: StageOutput,
    space: StageOutput,
    matching: TargetGradientSettings,
    categories: Sequence[ClassSettings],
    text_tokens: Mapping[int, int],
    settings: WordTiltSettings,
    generation: GenerationSettings,
    seed: int,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Fit the tilt of every class: the rows and figures of the stage `word_tilt`.

    Args:
        target: with token rates.
        text_tokens: length of the texts, by label.
        generation: how texts are written.
    """
    naive_bayes = released_naive_bayes(target, space, template, matching)
    assert naive_bayes is not None
    with ComputeMeter(language_model) as meter:
        fitted = {
            category.label: fit_word_tilt(
                language_model,
                template,
                category.instruction,
                category.label,
                naive_bayes,
                text_tokens[category.label],
                settings,
                generation,
                seed,
            )
            for category in categories
        }
    tables = [word_tilt_table(language_model, label, tilt) for label, tilt in fitted.items()]
    before, after = zip(*(tilt.distances for tilt in fitted.values()), strict=True)
    of_classes = {"tilted_tokens": map(len, tables), "word_distance_before": before, "word_distance": after}
    figures = {name: dict(zip(map(str, fitted), values, strict=True)) for name, values in of_classes.items()}
    return pd.concat(tables, ignore_index=True), figures | {"token_passes": meter.token_passes}


def fit_word_tilt(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    instruction: str,
    label: int,
    naive_bayes: NaiveBayes,
    text_tokens: int,
    settings: WordTiltSettings,
    generation: GenerationSettings,
    seed: int,
) -> WordTilt:
    """Fit the tilt of one class's words.

    Texts are written as `generation` does, but none is rejected.

    Args:
        text_tokens: number of tokens that are written before a text is cut.

    Raises:
        InputError: if the vocabulary has no words to write with.
    """
    allowed = allowed_tokens(language_model, generation.projection.language)
    largest = naive_bayes.weights.abs().amax(dim=0).clamp_max(MAX_EVIDENCE)
    ratios = naive_bayes.log_ratios(template.labels.index(label)) + settings.emphasis * largest
    words = allowed.beginnings(len(ratios)).cpu() & (naive_bayes.public > 0)  # whose rates are known
    tilted = words & (ratios.abs() > EVIDENCE)
    before = _shares(naive_bayes.public, words)
    wanted = _shares(naive_bayes.public * (settings.strength * ratios).exp(), words)

    method = generation.written if generation.method == "written" else generation.search
    ends = SentenceEnds(language_model) if generation.whole_sentences else None
    prompt_cache = PromptCache(language_model, instruction)
    tilt, written = (settings.strength * ratios) * tilted, before
    title = f"word_tilt, {label}"
    for iteration in trange(settings.iterations, desc=title, disable=None, leave=False):
        random = np.random.default_rng([seed, label, iteration, STREAM])
        uniforms = random.random((settings.texts, text_tokens))
        ids = write_texts(language_model, allowed, prompt_cache, uniforms, method.top_k, tilt=tilt, ends=ends)
        texts = released_texts(language_model, template, ids)
        counts = _texts_with(texts["token_ids"].tolist(), words)
        written = _shares(counts, words)
        tilt = (tilt + correction(wanted * counts.sum(), counts) * tilted).clamp(-MAX_TILT, MAX_TILT)
    return WordTilt(tilt, wanted, written, before)


def correction(wanted: Float[Tensor, " tokens"], written: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Return by how much (nats) to change tilts that gave `written` texts with a token where `wanted` were due."""
    larger = torch.maximum(wanted, written)
    return larger / (larger + CAUTION) * ((wanted + 0.5) / (written + 0.5)).log()


def word_tilt_table(language_model: LanguageModel, label: int, fitted: WordTilt) -> pd.DataFrame:
    """Tabulate the tilted tokens of a class, with the columns of the stage `word_tilt`; most wanted first."""
    tokens = fitted.tilt.nonzero()[:, 0]
    order = tokens[fitted.wanted[tokens].argsort(descending=True, stable=True)]
    return pd.DataFrame(
        {
            "label": label,
            "token_id": order.numpy(),
            "token": [language_model.decode([token]) for token in order.tolist()],
            "tilt": fitted.tilt[order].numpy(),
            "wanted": fitted.wanted[order].numpy(),
            "written": fitted.written[order].numpy(),
            "before": fitted.before[order].numpy(),
        }
    )


def tilt_of(table: pd.DataFrame, label: int, vocabulary: int) -> Float[Tensor, " vocabulary"]:
    """Read the tilt of a class from the rows of the stage `word_tilt`."""
    rows = table[table["label"] == label]
    tilt = torch.zeros(vocabulary, dtype=torch.float64)
    tilt[torch.tensor(rows["token_id"].to_numpy())] = torch.tensor(rows["tilt"].to_numpy())
    return tilt


def _texts_with(texts: list[list[int]], words: Bool[Tensor, " vocabulary"]) -> Float[Tensor, " vocabulary"]:
    """Count the texts that contain each of the words."""
    tokens = torch.tensor([token for text in texts for token in sorted(set(text))], dtype=torch.int64)
    return torch.bincount(tokens, minlength=len(words)).double() * words


def _shares(
    rates: Float[Tensor, " vocabulary"], words: Bool[Tensor, " vocabulary"]
) -> Float[Tensor, " vocabulary"]:
    of_words = rates * words
    return of_words / of_words.sum().clamp_min(1e-300)  # no word has a rate in a vocabulary of common tokens
