"""Lengths, vocabulary and the map of two sets of texts, compared with counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import TruncatedSVD

from gradmm.metrics.diversity import distinct_n, self_bleu
from gradmm.metrics.resemblance import MAX_COMPARED, MAX_MAPPED, resemblance

TASTES, DISHES = ("hot", "salty"), ("fish", "rice", "egg")
VERBS, KINDS = ("sings", "sleeps"), ("long", "short", "B")
FOOD = [f"the soup was {taste} and the {dish} cold" for taste in TASTES for dish in DISHES]
FILM = [f"an actor {verb} through this {kind} film" for verb in VERBS for kind in KINDS]


def test_figures_of_both_sides_are_those_of_their_texts() -> None:
    found = resemblance(["A cat, a dog!", "It's late"], ["the cat sat", "a cat"], seed=0)
    assert sorted(found.synthetic.lengths) == [3, 4]  # it's: two words
    assert sorted(found.real.lengths) == [2, 3]
    assert (found.synthetic.vocabulary, found.real.vocabulary) == (6, 4)
    assert found.synthetic.shared == pytest.approx(3 / 7)  # a, cat, a
    assert found.real.shared == pytest.approx(3 / 5)  # cat, a, cat
    assert found.real.distinct_2 == distinct_n(["the cat sat", "a cat"], 2)
    assert found.real.self_bleu == pytest.approx(self_bleu(["the cat sat", "a cat"]))


def test_as_many_real_texts_are_drawn_by_the_seed() -> None:
    real = [f"word{n}" for n in range(3 * MAX_COMPARED)]
    few = resemblance(FOOD, real, seed=1)
    assert len(few.real.lengths) == few.real.vocabulary == len(FOOD)
    again, other = resemblance(FOOD, real, seed=1), resemblance(FOOD, real, seed=2)
    assert np.array_equal(again.real.places, few.real.places)
    many = resemblance(real, list(reversed(real)), seed=1)
    assert len(many.synthetic.lengths) == MAX_COMPARED
    assert many.synthetic.places.shape == many.real.places.shape == (MAX_MAPPED, 2)
    assert 0.2 < many.synthetic.shared < 0.5 != other.synthetic.shared  # a third, on average


def test_the_map_separates_texts_of_other_words_and_not_those_of_the_same() -> None:
    apart = resemblance(FOOD, FILM, seed=0)
    first = apart.synthetic.places[:, 0], apart.real.places[:, 0]
    assert max(map(min, first)) > min(map(max, first))
    assert 0 < apart.explained[1] < apart.explained[0] <= 1
    same = resemblance(FOOD, FOOD, seed=0)
    assert sorted(same.synthetic.places[:, 0]) == pytest.approx(sorted(same.real.places[:, 0]))


def test_the_axes_are_the_directions_of_largest_variance() -> None:
    found = resemblance(FOOD, FILM, seed=0)
    places = np.concatenate([found.synthetic.places, found.real.places])
    assert places.mean(axis=0) == pytest.approx([0, 0])
    singular = TruncatedSVD(1, random_state=0).fit(places).singular_values_[0]
    assert np.linalg.norm(places[:, 0]) == pytest.approx(singular)
    assert abs(places[:, 0] @ places[:, 1]) < 1e-9


@pytest.mark.parametrize("texts", [[], [""], ["?", "!"], ["one"], ["same words"] * 3])
def test_texts_without_a_direction_are_all_in_one_place(texts: list[str]) -> None:
    found = resemblance(texts, texts, seed=0)
    assert len(found.synthetic.places) == len(texts)
    assert not found.synthetic.places.any()
    assert found.explained == (0.0, 0.0)
