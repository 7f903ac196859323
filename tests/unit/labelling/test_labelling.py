from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradmm.errors import InputError
from gradmm.labelling.hard_rows import COPIES, label_counts
from gradmm.labelling.labelling import labelled_texts, labelling_figures, probability_matrix

NAMES = {4: "dull", 0: "witty", 7: "grim"}


def filtered() -> pd.DataFrame:
    frame = pd.DataFrame({"id": ["4-0", "0-0", "7-0", "0-1"], "label": [4, 0, 7, 0], "text": ["a", "b", "c", "d"]})
    return frame.assign(label_name=frame["label"].map(NAMES), kept=True, reason="")


def test_the_label_becomes_the_likeliest_class_in_the_order_of_the_recipe() -> None:
    probabilities = np.array([[0.2, 0.7, 0.1], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2], [0.0, 0.0, 1.0]])
    labelled = labelled_texts(filtered(), probabilities, NAMES)
    assert labelled["label"].tolist() == [0, 0, 4, 7]  # of equal ones the first
    assert labelled["label_name"].tolist() == ["witty", "witty", "dull", "grim"]
    assert labelled["written_for"].tolist() == [4, 0, 7, 0]
    assert labelled["text"].tolist() == ["a", "b", "c", "d"]
    assert not {"kept", "reason"} & set(labelled.columns)
    np.testing.assert_array_equal(probability_matrix(labelled), probabilities)
    figures = labelling_figures(labelled, NAMES)
    assert figures["texts_by_label"] == {"4": 1, "0": 2, "7": 1}
    assert figures["expected_by_label"] == pytest.approx({"4": 0.7, "0": 1.9, "7": 1.4})
    assert figures["agreement"] == 0.25
    assert figures["confidence"] == pytest.approx((0.7 + 0.8 + 0.4 + 1) / 4)
    entropies = [-sum(p * np.log(p) for p in row if p) for row in probabilities]
    assert figures["entropy"] == pytest.approx(np.mean(entropies))


def test_hard_labels_are_the_classes_that_texts_were_written_for() -> None:
    labelled = labelled_texts(filtered(), None, NAMES)
    assert labelled["label"].tolist() == labelled["written_for"].tolist() == [4, 0, 7, 0]
    np.testing.assert_array_equal(probability_matrix(labelled), [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]])
    figures = labelling_figures(labelled, NAMES)
    assert figures["agreement"] == figures["confidence"] == 1
    assert figures["entropy"] == 0


distributions = arrays(float, st.tuples(st.integers(1, 5), st.integers(2, 6)), elements=st.floats(0, 1)).map(
    lambda weights: (weights + 1e-6) / (weights + 1e-6).sum(axis=1, keepdims=True)
)


@given(distributions, st.integers(1, 30))
def test_copies_are_in_proportion_to_the_probabilities(probabilities: np.ndarray, copies: int) -> None:
    counts = label_counts(probabilities, copies)
    assert (counts.sum(axis=1) == copies).all()
    assert (np.abs(counts - copies * probabilities) < 1).all()


def test_probabilities_that_are_multiples_of_a_copy_are_kept_exactly() -> None:
    tenths = np.array([[0.3, 0.7, 0.0], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0]])
    assert label_counts(tenths, COPIES).tolist() == [[3, 7, 0], [1, 2, 7], [10, 0, 0]]


def test_a_class_that_is_unlikely_everywhere_keeps_its_share_of_the_copies() -> None:
    shares = np.array([0.35, 0.3, 0.13, 0.1, 0.085, 0.035])
    logits = np.log(shares) + 0.5 * np.random.default_rng(0).normal(size=(2000, 6))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for some in (probabilities, probabilities[::2], probabilities[500:1000]):
        counts = label_counts(some)
        np.testing.assert_allclose(counts.mean(axis=0) / COPIES, some.mean(axis=0), rtol=0.03)


@pytest.mark.parametrize("row", [[0.5, 0.6, 0.0], [1.2, -0.2, 0.0], [float("nan"), 0.5, 0.5], [0.1, 0.1, 0.1]])
def test_probabilities_that_do_not_add_up_to_one_are_refused_with_their_text(row: list[float]) -> None:
    labelled = labelled_texts(filtered(), np.eye(3)[[0, 1, 2, 1]], NAMES)
    rows = [*labelled["probabilities"][:2], np.array(row), labelled["probabilities"][3]]
    labelled["probabilities"] = pd.Series(rows)
    with pytest.raises(InputError, match=r"the probabilities of text 7-0 are negative or add up to .*, not 1"):
        probability_matrix(labelled)


def test_texts_with_probabilities_of_other_classes_are_refused() -> None:
    labelled = labelled_texts(filtered(), None, NAMES)
    labelled["probabilities"] = pd.Series([*labelled["probabilities"][:3], np.array([0.5, 0.5])])
    with pytest.raises(InputError, match="different numbers of probabilities"):
        probability_matrix(labelled)
