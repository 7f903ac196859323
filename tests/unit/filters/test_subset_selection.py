"""Compare a set's closed-form loss, and the choice of a subset, with slow versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.settings import MatchingLoss
from gradmm.filters.subset_selection import TargetSet, set_losses, target_set
from gradmm.gradients.head_gradient import head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, make_batch, tokenise_template
from gradmm.target.target_space import FULL, TargetSpace, label_rows
from tests.conftest import examples

KINDS = get_args(MatchingLoss)
SENTENCES = ["the soup was warm and fresh", "late", "a quiet room", "never again : cold coffee", "rude staff !"]


def set_of(gradients: np.ndarray, kind: MatchingLoss = "cosine") -> TargetSet:
    """Make the set of the gradients given as rows; the target is the first unit vector."""
    rows = torch.from_numpy(gradients)
    return TargetSet(rows @ rows.mT, rows[:, 0].clone(), torch.ones((), dtype=torch.float64), kind)


def random_set(seed: int, texts: int, width: int, kind: MatchingLoss = "cosine") -> TargetSet:
    return set_of(np.random.default_rng(seed).normal(0.3, 1.0, size=(texts, width)), kind)


def lowest_loss(sets: TargetSet, count: int, among: Sequence[int]) -> float:
    return min(sets.loss(rows) for rows in combinations(among, count))


def greedy(sets: TargetSet, count: int, among: Sequence[int]) -> list[int]:
    chosen: list[int] = []
    for _ in range(min(count, len(among))):
        chosen.append(min(set(among) - set(chosen), key=lambda row: sets.loss([*chosen, row])))
    return chosen


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", ["full", "label-rows", "public-subspace"])
@pytest.mark.parametrize("verbaliser", [" good", " not really very good at all"])
def test_the_loss_of_a_set_is_that_of_its_mean_gradient(
    phi: LanguageModel, verbaliser: str, kind: str, centred: bool
) -> None:
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: verbaliser}, max_text_tokens=64)
    template = replace(tokenise_template(phi, prompt_template), prefix=(3,))
    texts = [phi.encode(sentence) for sentence in SENTENCES]
    gradients = head_gradients(phi, make_batch(template, texts, [1] * len(texts), phi.device))
    random = torch.Generator().manual_seed(0)
    space = FULL
    if kind != "full":
        space = replace(space, rows=torch.tensor(label_rows(template)))
    if kind == "public-subspace":
        basis = torch.linalg.qr(torch.randn(phi.head.shape[1], 3, generator=random, dtype=torch.float64)).Q
        space = replace(space, basis=basis)
    shape = space.project(gradients, 1).materialise()[0].shape
    if centred:
        centre = torch.randn(*shape, generator=random, dtype=torch.float64) / 10
        space = TargetSpace(space.rows, space.basis, {0: torch.zeros_like(centre), 1: centre})
    target = torch.randn(*shape, generator=random, dtype=torch.float64)

    sets = target_set(phi, template, texts, 1, target, space, "cosine", batch_size=2)
    by_distance = replace(sets, kind="distance")
    every = space.project(gradients, 1).materialise()
    for size in range(1, len(texts) + 1):
        for rows in combinations(range(len(texts)), size):
            mean = every[list(rows)].mean(dim=0).flatten()
            cosine = torch.nn.functional.cosine_similarity(mean, target.flatten(), dim=0)
            assert sets.loss(rows) == pytest.approx(1 - float(cosine), abs=1e-6)
            apart = (mean - target.flatten()).square().sum() / target.square().sum()
            assert by_distance.loss(rows) == pytest.approx(float(apart), abs=1e-6)
    for each in (sets, by_distance):
        alone = space.project(gradients, 1).matching_losses(target, each.kind)
        assert [each.loss([i]) for i in range(len(texts))] == pytest.approx(alone.tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_that_vanishes_has_loss_one(kind: MatchingLoss) -> None:
    sets = set_of(np.array([[1.0, 2.0], [-1.0, -2.0], [0.5, -3.0], [0.0, 0.0]]), kind)
    for rows in ([], [0, 1], [3], [0, 1, 3]):
        assert sets.loss(rows) == 1.0
    if kind == "cosine":
        assert sets.loss([0, 1, 2]) == pytest.approx(sets.loss([2]))
    else:  # the mean of the three is a third as long
        assert sets.loss([0, 1, 2]) == pytest.approx((0.5 / 3 - 1) ** 2 + 1)


choices = {
    "kind": st.sampled_from(KINDS),
    "seed": st.integers(0, 2**31),
    "texts": st.integers(1, 9),
    "width": st.integers(2, 5),
    "count": st.integers(1, 10),
}


@examples(150)
@given(**choices, data=st.data())
def test_a_choice_is_sorted_distinct_and_among_the_given_rows(
    kind: MatchingLoss, seed: int, texts: int, width: int, count: int, data: st.DataObject
) -> None:
    among = data.draw(st.lists(st.integers(0, texts - 1), min_size=1, unique=True))
    sets = random_set(seed, texts, width, kind)
    chosen = sets.choose(count, among)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(among)
    assert len(chosen) == min(count, len(among))
    assert chosen == sets.choose(count, among)
    assert chosen == sets.choose(count, sorted(among))  # independent of the order of the rows


@examples(150)
@given(**choices)
def test_a_choice_is_at_least_as_good_as_the_greedy_one_and_no_swap_improves_it(
    kind: MatchingLoss, seed: int, texts: int, width: int, count: int
) -> None:
    sets = random_set(seed, texts, width, kind)
    among = list(range(0, texts, 2))
    chosen = sets.choose(count, among, sweeps=100)
    loss = sets.loss(chosen)
    for sweeps in (1, 5, 100):
        assert loss <= sets.loss(sets.choose(count, among, sweeps=sweeps)) + 1e-9
    assert sets.loss(sets.choose(count, among)) <= sets.loss(greedy(sets, count, among)) + 1e-9
    for row in chosen:
        others = [other for other in chosen if other != row]
        for new in set(among) - set(chosen):
            assert loss <= sets.loss([*others, new]) + 1e-9


@examples(60)
@given(seed=st.integers(0, 2**31), texts=st.integers(1, 9), width=st.integers(1, 5))
def test_choosing_one_row_gives_the_best_and_choosing_all_gives_all(seed: int, texts: int, width: int) -> None:
    sets = random_set(seed, texts, width)
    assert sets.loss(sets.choose(1, range(texts))) == pytest.approx(lowest_loss(sets, 1, range(texts)), abs=1e-12)
    assert sets.choose(texts, range(texts)) == list(range(texts))


def test_ties_go_to_the_first_row() -> None:
    sets = set_of(np.array([[0.0, 1.0], [1.0, 0.5], [1.0, 0.5], [1.0, 0.5]]))
    assert sets.choose(1, range(4)) == [1]
    assert sets.choose(1, [3, 2]) == [2]
    assert sets.choose(2, range(4)) == [1, 2]


def test_swaps_find_rows_that_compensate_one_another() -> None:
    sets = set_of(np.array([[3.0, 0.0], [3.0, 2.0], [1.0, -2.0], [2.0, -3.0]]))
    assert sets.choose(1, range(4)) == [0]
    assert sorted(greedy(sets, 2, range(4))) == sets.choose(2, range(4), sweeps=0) == [0, 1]
    assert sets.choose(2, range(4)) == [1, 2]
    assert sets.loss([1, 2]) == pytest.approx(0.0, abs=1e-12)


def test_most_choices_are_optimal() -> None:
    regrets = []
    for seed in range(100):
        sets = random_set(seed, texts=8, width=3)
        regrets.append(sets.loss(sets.choose(3, range(8))) - lowest_loss(sets, 3, range(8)))
    assert np.mean(np.array(regrets) < 1e-9) > 0.85
    assert np.mean(regrets) < 0.01


def test_a_chosen_set_matches_better_than_the_texts_that_match_best_one_by_one() -> None:
    for seed in range(20):
        sets = random_set(seed, texts=60, width=20)
        alone = sorted(range(60), key=lambda row: sets.loss([row]))[:10]
        assert sets.loss(sets.choose(10, range(60))) < 0.85 * sets.loss(alone)


def test_rows_that_cancel_up_to_rounding_are_not_chosen() -> None:
    sets = set_of(np.array([[0.9], [-0.6], [-0.6], [0.1], [-0.3]]))
    assert sets.loss(sets.choose(3, range(5))) == pytest.approx(lowest_loss(sets, 3, range(5)), abs=1e-6)


def test_a_target_of_zero_has_no_direction(phi: LanguageModel) -> None:
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=20)
    template = tokenise_template(phi, prompt_template)
    texts = [phi.encode("the soup was warm"), phi.encode("late again")]
    sets = target_set(phi, template, texts, 1, torch.zeros_like(phi.head), FULL, "cosine")
    assert sets.loss([0, 1]) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_distance_loss_longer_gradients_compensate_shorter_ones(kind: MatchingLoss) -> None:
    """All point along the target; only two of them have its length on average."""
    sets = set_of(np.array([[0.5, 0.0], [0.6, 0.0], [1.5, 0.0], [0.7, 0.0]]), kind)
    assert sets.choose(2, range(4)) == ([0, 1] if kind == "cosine" else [0, 2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("centred", [False, True])
def test_losses_by_accumulation_are_those_of_the_gram_matrix(
    phi: LanguageModel, template: TokenisedTemplate, kind: MatchingLoss, centred: bool
) -> None:
    texts = [phi.encode(sentence) for sentence in SENTENCES]
    random = torch.Generator().manual_seed(0)
    target, centre = (torch.randn(phi.head.shape, generator=random, dtype=torch.float64) / n for n in (1, 10))
    space = replace(FULL, centres={1: centre}) if centred else FULL
    sets = target_set(phi, template, texts, 1, target, space, kind)
    for kept in ([True] * 5, [False, True, True, False, True], [False] * 5):
        rows = [i for i, stays in enumerate(kept) if stays]
        losses = set_losses(phi, template, texts, kept, 1, target, space, kind, batch_size=2)
        assert losses == pytest.approx((sets.loss(range(5)), sets.loss(rows)), abs=1e-9)
