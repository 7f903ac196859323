"""The TF-IDF classifier compared with scikit-learn's on repeated rows and with the gradient of its loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.evaluation.finetune_eval import COLUMNS, CORRECT, accuracies_by_seed
from gradmm.evaluation.tfidf_classifier import (
    INVERSE_PENALTIES,
    correct_and_loss,
    evaluate_classifier,
    fit_expected_loss,
    fitted_vectorizer,
    one_hot,
    word_weights,
)

CLASSES = (7, 2, 5)
WORDS = {7: ("warm", "fresh", "good"), 2: ("late", "rude", "cold"), 5: ("blue", "round", "tall")}


def sample(rows: int, seed: int = 0, noise: float = 0.3) -> LabelledTexts:
    """Texts with words of their class and of others."""
    random = np.random.default_rng(seed)
    labels = [CLASSES[i % len(CLASSES)] for i in range(rows)]

    def word(label: int) -> str:
        return str(random.choice(WORDS[label if random.uniform() > noise else int(random.choice(CLASSES))]))

    return LabelledTexts(tuple(" ".join(word(label) for _ in range(6)) for label in labels), tuple(labels))


def logits(regression: LogisticRegression, features) -> np.ndarray:
    return np.log(regression.predict_proba(features))


@pytest.mark.parametrize("classes", [CLASSES, CLASSES[:2]])
def test_probabilities_of_zero_and_one_train_as_labels_do(classes: tuple[int, ...]) -> None:
    data = sample(60)
    data = data.take([i for i, label in enumerate(data.labels) if label in classes])
    features = word_weights(fitted_vectorizer(data.texts), data.texts)
    soft = fit_expected_loss(features, one_hot(data.labels, classes), 1.0)
    hard = LogisticRegression(C=1.0, tol=1e-6).fit(features, [classes.index(label) for label in data.labels])
    np.testing.assert_allclose(logits(soft, features), logits(hard, features), atol=1e-4)


def test_probabilities_in_tenths_train_as_so_many_copies_of_each_text_do() -> None:
    texts = sample(40).texts
    tenths = np.random.default_rng(1).multinomial(10, [0.5, 0.3, 0.2], size=len(texts))
    features = word_weights(fitted_vectorizer(texts), texts)
    soft = fit_expected_loss(features, tenths / 10, 1.0)
    rows, columns = (
        np.repeat(np.arange(len(texts)), 10),
        np.concatenate([np.repeat(np.arange(3), of_text) for of_text in tenths]),
    )
    # Ten copies of each text in place of one: a tenth of C.
    copies = LogisticRegression(C=0.1, tol=1e-6).fit(features[rows], columns)
    np.testing.assert_allclose(logits(soft, features), logits(copies, features), atol=1e-4)


@pytest.mark.parametrize("inverse_penalty", INVERSE_PENALTIES)
def test_the_gradient_of_the_penalised_expected_loss_is_zero(inverse_penalty: float) -> None:
    texts = sample(50).texts
    probabilities = np.random.default_rng(2).dirichlet([0.5, 1.0, 2.0], size=len(texts))
    features = word_weights(fitted_vectorizer(texts), texts)
    regression = fit_expected_loss(features, probabilities, inverse_penalty)
    error = regression.predict_proba(features) - probabilities  # gradient of the expected loss by logits
    gradient = inverse_penalty * error.T @ features.toarray() + regression.coef_
    size = inverse_penalty * len(texts)
    assert np.abs(gradient).max() / size < 2e-6
    assert np.abs(error.sum(axis=0)).max() / len(texts) < 2e-6  # the intercept has no penalty


def test_a_class_without_any_probability_is_known_and_never_predicted() -> None:
    data = sample(30)
    present = data.take([i for i, label in enumerate(data.labels) if label != 5])
    frame, _ = evaluate_classifier(
        "random", present.texts, one_hot(present.labels, CLASSES), CLASSES, {"validation": data, "test": data}, 0
    )
    assert (frame["accuracy"] <= 2 / 3).all()
    assert np.isfinite(frame["loss"]).all()
    alone = data.take([i for i, label in enumerate(data.labels) if label == 5])
    frame, _ = evaluate_classifier(
        "random", alone.texts, one_hot(alone.labels, CLASSES), CLASSES, {"validation": data, "test": alone}, 0
    )
    assert frame["accuracy"].tolist() == pytest.approx([1 / 3, 1.0])


def test_features_are_sublinear_tf_idf_of_words_and_pairs() -> None:
    vectorizer = fitted_vectorizer(["good good book", "good soup"])
    assert sorted(vectorizer.vocabulary_) == ["book", "good", "good book", "good good", "good soup", "soup"]
    row = dict(
        zip(
            vectorizer.get_feature_names_out(),
            word_weights(vectorizer, ["good good book"]).toarray()[0],
            strict=True,
        )
    )
    idf = {1: math.log(3 / 2) + 1, 2: 1.0}  # by the number of texts with the word
    raw = {"good": (1 + math.log(2)) * idf[2], "book": idf[1], "good good": idf[1], "good book": idf[1]}
    length = math.sqrt(sum(value**2 for value in raw.values()))
    assert row == pytest.approx(dict.fromkeys(row, 0.0) | {word: value / length for word, value in raw.items()})


def test_validation_chooses_c_and_test_has_no_part_in_it() -> None:
    data, validation = sample(60, noise=0.7), sample(90, seed=1, noise=0.5)
    probabilities = one_hot(data.labels, CLASSES)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(data.texts)
    features, columns = word_weights(vectorizer, validation.texts), [CLASSES.index(i) for i in validation.labels]
    measured = {
        c: correct_and_loss(
            fit_expected_loss(word_weights(vectorizer, data.texts), probabilities, c), features, np.array(columns)
        )
        for c in INVERSE_PENALTIES
    }
    best = max(measured, key=lambda c: (measured[c][0].mean(), -measured[c][1]))
    for test in (sample(30, seed=2), sample(30, seed=3)):
        held_out = {"validation": validation, "test": test}
        frame, chosen = evaluate_classifier("gradmm", data.texts, probabilities, CLASSES, held_out, 4)
        assert chosen == best
        assert frame.columns.tolist() == COLUMNS
        assert frame["split"].tolist() == ["validation", "test"]
        assert tuple(frame.loc[0, ["accuracy", "loss"]]) == (measured[best][0].mean(), measured[best][1])
        assert frame[CORRECT][0] is None
        assert np.mean(frame[CORRECT][1]) == frame["accuracy"][1]
        assert len(frame[CORRECT][1]) == len(test)
        assert accuracies_by_seed(frame)[["seed", "accuracy"]].to_numpy().tolist() == [[4, frame["accuracy"][1]]]


def test_correct_rows_and_loss_are_those_of_a_slow_loop() -> None:
    data = sample(20)
    features = word_weights(fitted_vectorizer(data.texts), data.texts)
    regression = fit_expected_loss(features, one_hot(data.labels, CLASSES), 1.0)
    columns = np.array([CLASSES.index(label) for label in data.labels])
    chances = regression.predict_proba(features)
    correct = [chances[i].argmax() == column for i, column in enumerate(columns)]
    losses = [-math.log(chances[i, column]) for i, column in enumerate(columns)]
    found, loss = correct_and_loss(regression, features, columns)
    assert found.tolist() == correct
    assert loss == pytest.approx(np.mean(losses))


@pytest.mark.parametrize("texts", [[], ["", "! ?"]])
def test_texts_without_words_are_refused_in_one_line(texts: list[str]) -> None:
    with pytest.raises(InputError, match="no text has a word"):
        fitted_vectorizer(texts)
