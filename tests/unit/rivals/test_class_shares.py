"""Soft labels of rivals' texts that know the classes' shares, and the noise of the counts that they are from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from gradmm.labelling.labelling import labelled_texts
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals.class_shares import with_class_shares
from gradmm.rivals.epsvec import PublicMeans, released_vectors
from gradmm.rivals.private_evolution import voted_texts
from gradmm.rivals.releases import counted_records, mechanism_of_part, read_records
from gradmm.target.features import TextFeatures
from tests.conftest import examples, make_mechanism

NAMES = {3: "fear", 1: "joy"}


def labelled(*of_first: float) -> pd.DataFrame:
    """Texts written for joy, with these probabilities of fear."""
    texts = pd.DataFrame({"id": [str(n) for n in range(len(of_first))], "label": 1, "text": "a"})
    return labelled_texts(texts, np.array([[p, 1 - p] for p in of_first]), NAMES)


@examples(30)
@given(
    st.lists(st.floats(0.001, 0.999), min_size=1, max_size=5),
    st.tuples(*[st.floats(0, 1e5)] * 2),
    st.tuples(*[st.floats(0, 1e4)] * 2),
)
def test_probabilities_are_multiplied_by_the_smoothed_shares(
    of_first: list[float], records: tuple[float, float], deviations: tuple[float, float]
) -> None:
    counts, noise = (dict(zip(NAMES, each, strict=True)) for each in (records, deviations))
    found, figures = with_class_shares(labelled(*of_first), counts, noise, NAMES)
    weights = [count + 10 + deviation for count, deviation in zip(records, deviations, strict=True)]
    for p, row in zip(of_first, found["probabilities"], strict=True):
        both = p * weights[0], (1 - p) * weights[1]
        assert row == pytest.approx([each / sum(both) for each in both], abs=1e-9)
    shares = {"3": weights[0] / sum(weights), "1": weights[1] / sum(weights)}
    assert figures["class_shares"] == pytest.approx(shares)


def test_the_likeliest_class_follows_the_shares_and_the_class_written_for_stays() -> None:
    found, _ = with_class_shares(labelled(0.4, 0.9), {1: 100.0, 3: 9_000.0}, {1: 1.0, 3: 1.0}, NAMES)
    assert found["label"].tolist() == [3, 3]
    assert found["label_name"].tolist() == ["fear", "fear"]
    assert found["written_for"].tolist() == [1, 1]


def test_counts_that_drown_in_noise_leave_the_labels_nearly_as_they_are() -> None:
    found, _ = with_class_shares(labelled(0.4), {1: 50.0, 3: -7_000.0}, {1: 3_000.0, 3: 3_000.0}, NAMES)
    assert found["probabilities"].iloc[0] == pytest.approx([0.4, 0.6], abs=0.01)


def test_certain_texts_stay_certain() -> None:
    found, _ = with_class_shares(labelled(1.0, 0.0), {1: 900.0, 3: 5.0}, {1: 1.0, 3: 1.0}, NAMES)
    assert np.stack(found["probabilities"].tolist()).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_records_are_counted_by_label_in_figures() -> None:
    figures = counted_records({3: 2.5, 1: -4.0}, {3: 1.0, 1: 2.0})
    assert figures == {"records": {"3": 2.5, "1": -4.0}, "records_deviation": {"3": 1.0, "1": 2.0}}
    assert read_records(figures) == ({3: 2.5, 1: -4.0}, {3: 1.0, 1: 2.0})


def votes(mechanism: GaussianMechanism) -> dict[str, Any]:
    """Figures of a histogram of 40 records of fear and 7 of joy, by ten iterations' mechanism."""
    texts = pd.DataFrame({"label": [3] * 9 + [1] * 4})
    counts = {3: np.array([40, *[0] * 8]), 1: np.array([1, 2, 2, 2])}
    return voted_texts(texts, counts, mechanism_of_part(mechanism, 10), 2)[1]


def means(mechanism: GaussianMechanism) -> dict[str, Any]:
    """Figures of sums of x = (h, 1/2) / sqrt(1 + 1/4) over 40 records of fear and 7 of joy."""
    features = TextFeatures(torch.zeros(2).double(), torch.eye(2).double())
    public = PublicMeans(features, 1.0, {label: torch.zeros(2).double() for label in NAMES})
    of_record = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64) / 1.25**0.5
    return released_vectors({3: 40 * of_record, 1: 7 * of_record}, public, mechanism)[1]


@pytest.mark.parametrize("released", [votes, means])
def test_counts_have_the_noise_that_they_claim(released: Callable[[GaussianMechanism], dict[str, Any]]) -> None:
    """The chi-squared statistic of 300 releases, with a mechanism of epsilon 1."""
    mechanism, draws = make_mechanism(1.0), 300
    errors = []
    for _ in range(draws):
        records, deviations = read_records(released(mechanism))
        errors += [(records[3] - 40) / deviations[3], (records[1] - 7) / deviations[1]]
    squares = float(np.square(errors).sum())
    assert chi2.ppf(1e-6, 2 * draws) < squares < chi2.isf(1e-6, 2 * draws)
    assert abs(np.mean(errors)) < 5 / (2 * draws) ** 0.5
