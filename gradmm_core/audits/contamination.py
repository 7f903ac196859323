"""Contamination: whether the public model has seen the private records before.

A guarantee bounds what a release tells beyond the public model. It does not cover what that model read in its own
training, and accuracies on such data are too high. If the model has read the train rows, but not the test
rows, it should find the train rows likelier. Two scores of a text are compared between both, and higher
means more likely to have been read:

    loss         minus the mean loss (nats) of the text's tokens (Yeom et al. 2018)
    neighbours   the mean loss of the text with two neighbouring words exchanged, at `NEIGHBOURS` random places,
                 less its own. This compares a text with itself, so that easy texts do not count as known (as
                 Mattern et al. 2023 do by replacing words)

The area under the ROC curve (AUC) is 1/2 if the rows cannot be told apart. Rows that differ for another reason, as
phrases and sentences do, move it as well, and rows of both splits that were read leave it where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.special import ndtri

from gradmm.config.settings import Settings
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.perplexity import log_perplexities
from gradmm.metrics.roc import delong

#: Rows of each split that are compared.
ROWS = 1000

#: Tokens of a row that are read.
MAX_TOKENS = 256

#: Neighbours of each text.
NEIGHBOURS = 5

#: Significance of the one-sided test of an AUC above 1/2, and the power at which an AUC counts as detectable.
SIGNIFICANCE, POWER = 0.05, 0.8

#: Rows of each split that a comparison needs.
MIN_ROWS = 20

#: Rate and batch size at which a copy of the model reads rows, to see whether the comparison would tell.
READING_RATE, READING_BATCH = 1e-4, 8


class Comparison(Settings):
    """One score, compared between rows that may have been read and rows that were not.

    Attributes:
        read, test: numbers of rows.
        auc: the area under the ROC curve; `low` and `high` end its 95% interval (DeLong et al. 1988).
        detectable_auc: the smallest one that a one-sided 5% test finds with a power of 80%.
    """

    score: str
    read: int
    test: int
    auc: float
    low: float
    high: float
    detectable_auc: float

    @property
    def found(self) -> bool:
        """Whether the rows that may have been read are likelier, at the significance of the test."""
        return self.auc - 0.5 > _normal_quantile(1 - SIGNIFICANCE) * _null_deviation(self.read, self.test)


class Contamination(Settings):
    """The comparison of the train rows with the test rows, and what it finds in a copy that has read some.

    Round trip: `from_table(to_table()) == self`.

    Attributes:
        comparisons: by score.
        planted: the same scores of a copy of the model that has read half of the train rows once, which are
            compared with the other half. Empty where there is no copy, or too few rows for two halves.
    """

    comparisons: tuple[Comparison, ...]
    planted: tuple[Comparison, ...]

    @property
    def found(self) -> bool:
        """Whether the score that compares a text with itself is higher for the train rows."""
        return self.comparisons[-1].found

    @property
    def verdict(self) -> str:
        """The conclusion, in one line."""
        if self.found:
            return (
                "the model finds the train rows likelier than the test rows, each compared with itself: it may "
                "have read them, or the splits differ in another way"
            )
        return "no sign that the model has read the train rows and not the test rows"

    def to_table(self) -> pd.DataFrame:
        """Return one row for each comparison: the rows of the stage `contamination`."""
        rows = [{"planted": False, **each.model_dump()} for each in self.comparisons]
        return pd.DataFrame([*rows, *({"planted": True, **each.model_dump()} for each in self.planted)])

    @classmethod
    def from_table(cls, rows: pd.DataFrame) -> Contamination:
        """Read the rows of the stage `contamination`."""

        def part(planted: bool) -> tuple[Comparison, ...]:
            of_part = rows[rows["planted"] == planted].drop(columns="planted")
            return tuple(Comparison.model_validate(row) for row in of_part.to_dict("records"))

        return cls(comparisons=part(False), planted=part(True))

    def figures(self) -> dict[str, Any]:
        """Return the area of each score with its interval, and the smallest that would be found."""
        areas = {each.score: each for each in self.comparisons}
        areas |= {f"planted {each.score}": each for each in self.planted}
        return {
            "found": self.found,
            "areas": {name: each.model_dump(exclude={"score"}) for name, each in areas.items()},
        }


def contamination(
    language_model: LanguageModel,
    train: Sequence[str],
    test: Sequence[str],
    copy: Callable[[], LanguageModel] | None,
    seed: int = 0,
) -> Contamination:
    """Compare train rows with test rows.

    Args:
        copy: makes a copy of the model whose weights can be trained; None leaves `planted` empty.
        seed: draws `ROWS` rows of each, and the neighbours.

    Raises:
        InputError: for fewer than `MIN_ROWS` texts of two words and more.
    """
    rng = np.random.default_rng(seed)
    read, fresh = ([texts[i] for i in rng.permutation(len(texts))[:ROWS]] for texts in (list(train), list(test)))
    comparisons = compared(text_scores(language_model, read, seed), text_scores(language_model, fresh, seed))
    if copy is None:
        return Contamination(comparisons=comparisons, planted=())
    reader, half = copy(), len(read) // 2
    read_once(reader, read[:half], seed)
    known, unknown = (text_scores(reader, part, seed) for part in (read[:half], read[half:]))
    enough = min(len(known["loss"]), len(unknown["loss"])) >= MIN_ROWS
    return Contamination(comparisons=comparisons, planted=compared(known, unknown) if enough else ())


def text_scores(
    language_model: LanguageModel, texts: Sequence[str], seed: int
) -> dict[str, Float[np.ndarray, " texts"]]:
    """Compute both scores, by name. Texts of one word, which have no neighbours, are left out."""
    rng = np.random.default_rng(seed)
    texts = [beginning(language_model, text) for text in texts]
    with_neighbours = [[text, *neighbours(text, rng)] for text in texts if len(text.split()) > 1]
    tokens = [language_model.encode(each) for group in with_neighbours for each in group]
    losses = np.array(log_perplexities(language_model, tokens)).reshape(-1, 1 + NEIGHBOURS)
    losses = losses[np.isfinite(losses).all(axis=1)]
    return {"loss": -losses[:, 0], "neighbours": losses[:, 1:].mean(axis=1) - losses[:, 0]}


def beginning(language_model: LanguageModel, text: str) -> str:
    """Return the first words of a text, of at most `MAX_TOKENS` tokens, with room for another spelling."""
    limit = MAX_TOKENS if language_model.positions is None else min(MAX_TOKENS, language_model.positions * 3 // 4)
    ids = language_model.encode(text)
    if len(ids) <= limit:
        return text
    return language_model.tokenizer.decode(ids[:limit]).rpartition(" ")[0]


def neighbours(text: str, rng: np.random.Generator) -> list[str]:
    """Return the text with two neighbouring words exchanged, at random places."""
    words = text.split()
    places = rng.integers(0, len(words) - 1, NEIGHBOURS).tolist()
    return [" ".join([*words[:i], words[i + 1], words[i], *words[i + 2 :]]) for i in places]


def compared(
    read: dict[str, Float[np.ndarray, " read"]], test: dict[str, Float[np.ndarray, " test"]]
) -> tuple[Comparison, ...]:
    """Compare each score.

    Raises:
        InputError: for fewer than `MIN_ROWS` rows of either.
    """
    return tuple(_comparison(score, values, test[score]) for score, values in read.items())


def _comparison(score: str, read: Float[np.ndarray, " read"], test: Float[np.ndarray, " test"]) -> Comparison:
    few = min(len(read), len(test))
    if few < MIN_ROWS:
        problem = f"{few} rows of two words and more are too few to compare"
        raise InputError(problem, "contamination", f"give {MIN_ROWS} and more of train and of test")
    auc, deviation = delong(read, test)
    reach = _normal_quantile(1 - SIGNIFICANCE / 2) * deviation
    quantiles = _normal_quantile(1 - SIGNIFICANCE) + _normal_quantile(POWER)
    detectable = 0.5 + quantiles * _null_deviation(len(read), len(test))
    return Comparison(
        score=score,
        read=len(read),
        test=len(test),
        auc=auc,
        low=max(0.0, auc - reach),
        high=min(1.0, auc + reach),
        detectable_auc=min(1.0, detectable),
    )


def _normal_quantile(probability: float) -> float:
    return float(ndtri(probability))


def _null_deviation(read: int, test: int) -> float:
    """The standard deviation of the AUC of two samples of one distribution (Mann and Whitney 1947)."""
    return math.sqrt((read + test + 1) / (12 * read * test))


def read_once(language_model: LanguageModel, texts: Sequence[str], seed: int) -> None:
    """Train a model on texts, each of them once, by Adam on all weights that require gradients."""
    weights = [each for each in language_model.model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=READING_RATE)
    start = language_model.tokenizer.bos_token_id
    prefix = [] if start is None else [start]
    tokens = [[*prefix, *language_model.encode(beginning(language_model, text))] for text in texts]
    order = np.random.default_rng(seed).permutation([i for i, each in enumerate(tokens) if len(each) > 1])
    for first in range(0, len(order), READING_BATCH):
        part = [torch.tensor(tokens[i]) for i in order[first : first + READING_BATCH].tolist()]
        lengths = torch.tensor([len(each) for each in part])
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        counted = torch.arange(1, ids.shape[1]) < lengths[:, None]
        ids, counted = ids.to(language_model.device), counted.to(language_model.device)
        logits = language_model.model(input_ids=ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits[counted].float(), ids[:, 1:][counted]).backward()
        optimizer.step()
        optimizer.zero_grad()
