"""Evaluation without a language model: TF-IDF of words and word pairs, and logistic regression.

A text with class probabilities is one row for each class, weighted by the class's probability. The sum of the
weighted losses is then the expected loss under these probabilities, so that nothing is lost to rounded labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.evaluation.finetune_eval import COLUMNS, CORRECT
from gradmm.evaluation.schedule import Schedule

#: Values of C, the inverse strength of the L2 penalty, that validation chooses from.
INVERSE_PENALTIES = (0.1, 1.0, 10.0)

#: Largest entry of the gradient of the mean loss at the end: labels and probabilities of 0 and 1 then agree.
TOLERANCE = 1e-6

MAX_ITERATIONS = 2000


def evaluate_classifier(
    arm: str,
    texts: Sequence[str],
    probabilities: Float[np.ndarray, "texts classes"],
    labels: Sequence[int],
    held_out: Mapping[str, LabelledTexts],
    seed: int,
) -> tuple[pd.DataFrame, float]:
    """Train the classifier with every C, and evaluate the one with the best accuracy on validation.

    Ties go to the lowest validation loss, then to the smaller C.

    Args:
        labels: of the columns of `probabilities`.
        held_out: the splits `validation` and `test`.
        seed: of the texts. The training itself draws nothing.

    Returns:
        One row per split, with the columns `COLUMNS` and a learning rate and steps of 0; and the chosen C.

    Raises:
        InputError: if there are no texts, or none has a word of two letters.
    """
    vectorizer = fitted_vectorizer(texts)
    features = word_weights(vectorizer, texts)
    splits = {
        split: (word_weights(vectorizer, rows.texts), np.array([labels.index(label) for label in rows.labels]))
        for split, rows in held_out.items()
    }
    trained = {c: fit_expected_loss(features, probabilities, c) for c in INVERSE_PENALTIES}
    on_validation = {c: correct_and_loss(regression, *splits["validation"]) for c, regression in trained.items()}
    chosen = min(on_validation, key=lambda c: (-on_validation[c][0].mean(), on_validation[c][1], c))
    run = {"arm": arm, "seed": seed, **Schedule(0.0, 0)._asdict(), "step": 0}
    rows = []
    for split in ("validation", "test"):
        correct, loss = correct_and_loss(trained[chosen], *splits[split])
        row = {"split": split, "accuracy": float(correct.mean()), "loss": loss}
        rows.append(run | row | {CORRECT: correct.tolist() if split == "test" else None})
    return pd.DataFrame(rows, columns=COLUMNS), chosen


def fitted_vectorizer(texts: Sequence[str]) -> TfidfVectorizer:
    """Learn the words and word pairs of texts, and their inverse document frequencies.

    Raises:
        InputError: if there are no texts, or none has a word of two letters.
    """
    try:
        return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(texts)
    except ValueError as error:
        raise InputError(
            "no text has a word of two letters to train a classifier on", "texts", "look at the texts"
        ) from error


def word_weights(vectorizer: TfidfVectorizer, texts: Sequence[str]) -> csr_matrix:
    """Compute the TF-IDF weights of texts, one row each."""
    return csr_matrix(vectorizer.transform(texts))


def fit_expected_loss(
    features: csr_matrix, probabilities: Float[np.ndarray, "texts classes"], inverse_penalty: float
) -> LogisticRegression:
    """Minimise the expected loss of all texts, times C, plus half the squared norm of the weights.

    Every text is a row of each class, even of those with probability zero: the regression then knows all classes.

    Returns:
        A regression that predicts columns of `probabilities`.
    """
    texts, classes = probabilities.shape
    rows, columns = np.divmod(np.arange(texts * classes), classes)
    regression = LogisticRegression(C=inverse_penalty, tol=TOLERANCE, max_iter=MAX_ITERATIONS)
    return regression.fit(features[rows], columns, sample_weight=probabilities.ravel())


def one_hot(labels: Sequence[int], classes: Sequence[int]) -> Float[np.ndarray, "texts classes"]:
    """Return probability 1 for each text's label, with a column for each of `classes`."""
    return (np.array(labels)[:, None] == np.array(classes)).astype(float)


def correct_and_loss(
    regression: LogisticRegression, features: csr_matrix, columns: np.ndarray
) -> tuple[Bool[np.ndarray, " rows"], float]:
    """Return which rows are answered correctly, and the mean loss in nats, given each row's column."""
    logs = regression.predict_log_proba(features)
    return logs.argmax(axis=1) == columns, float(-logs[np.arange(len(columns)), columns].mean())
