"""Contamination: scores and their statistics against slow oracles, and a model that has read some texts."""

from __future__ import annotations

import copy
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from transformers import PreTrainedTokenizerFast

from gradmm.audits.contamination import (
    MIN_ROWS,
    NEIGHBOURS,
    Contamination,
    beginning,
    compared,
    contamination,
    neighbours,
    read_once,
    text_scores,
)
from gradmm.demo.grammar import private_rows
from gradmm.errors import InputError
from gradmm.lm.language_model import LanguageModel
from gradmm.metrics.roc import delong
from tests.conftest import tiny_language_model

finite = st.floats(-5, 5).map(lambda value: round(value, 1))  # with ties


def trainable(language_model: LanguageModel) -> LanguageModel:
    model = copy.deepcopy(language_model.model).float().requires_grad_(True)
    return LanguageModel(model, language_model.tokenizer)


@pytest.fixture(scope="module")
def tiny(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return tiny_language_model(tokenizer, "phi", dtype=torch.float32)


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return [text for text, _ in private_rows(240, random.Random(3))]


@given(st.lists(finite, min_size=2, max_size=12), st.lists(finite, min_size=2, max_size=12))
def test_the_auc_and_its_deviation_are_those_of_all_pairs(positives: list[float], negatives: list[float]) -> None:
    kernel = np.array([[(p > n) + (p == n) / 2 for n in negatives] for p in positives])
    auc, deviation = delong(np.array(positives), np.array(negatives))
    assert auc == pytest.approx(kernel.mean())
    assert auc == pytest.approx(roc_auc_score([1] * len(positives) + [0] * len(negatives), positives + negatives))
    expected = np.var(kernel.mean(axis=1), ddof=1) / len(positives)
    expected += np.var(kernel.mean(axis=0), ddof=1) / len(negatives)
    assert deviation == pytest.approx(math.sqrt(expected), abs=1e-12)


def test_errors_and_power_are_as_stated() -> None:
    rng, found, power, covered = np.random.default_rng(0), 0, 0, 0
    (first,) = compared({"loss": rng.normal(size=60)}, {"loss": rng.normal(size=90)})
    shift = math.sqrt(2) * norm.ppf(first.detectable_auc)  # AUC = Phi(shift / sqrt 2)
    for _ in range(2000):
        read, test = rng.normal(size=60), rng.normal(size=90)
        (null,) = compared({"loss": read}, {"loss": test})
        (moved,) = compared({"loss": read + shift}, {"loss": test})
        found += null.found
        power += moved.found
        covered += null.low <= 0.5 <= null.high
    assert found / 2000 == pytest.approx(0.05, abs=0.02)
    assert power / 2000 == pytest.approx(0.8, abs=0.05)
    assert covered / 2000 == pytest.approx(0.95, abs=0.02)


def test_a_neighbour_has_two_words_exchanged() -> None:
    text = "one two three four"
    found = neighbours(text, np.random.default_rng(0))
    assert len(found) == NEIGHBOURS
    assert set(found) <= {"two one three four", "one three two four", "one two four three"}
    assert neighbours("one two", np.random.default_rng(0)) == ["two one"] * NEIGHBOURS


def test_scores_are_of_the_texts_own_loss_and_that_of_its_neighbours(tiny: LanguageModel) -> None:
    texts = ["the soup was warm and good", "bad", "rude staff and cold coffee"]
    scores = text_scores(tiny, texts, seed=4)
    rng, expected = np.random.default_rng(4), []

    def loss(text: str) -> float:
        ids = torch.tensor([[tiny.tokenizer.bos_token_id, *tiny.encode(text)]])
        logs = tiny.model(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        return -float(logs.gather(1, ids[0, 1:, None]).mean())

    for text in (texts[0], texts[2]):  # one word has no neighbours
        others = [loss(each) for each in neighbours(text, rng)]
        expected.append((-loss(text), np.mean(others) - loss(text)))
    assert np.column_stack([scores["loss"], scores["neighbours"]]) == pytest.approx(np.array(expected), rel=1e-3)


def test_a_model_that_has_read_the_train_rows_is_found_and_one_that_has_not_is_not(
    tiny: LanguageModel, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradmm.audits.contamination.READING_RATE", 3e-3)
    train, test = sentences[:120], sentences[120:]
    clean = contamination(tiny, train, test, None)
    assert not any(each.found for each in clean.comparisons)
    assert not clean.found
    assert clean.planted == ()
    reader = trainable(tiny)
    for epoch in range(12):
        read_once(reader, train, seed=epoch)
    reader.model.requires_grad_(False)
    found = contamination(reader, train, test, None)
    assert found.found
    assert all(each.low > 0.5 for each in found.comparisons)


def test_the_planted_copy_reads_half_of_the_train_rows_and_leaves_the_model_alone(
    tiny: LanguageModel, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("gradmm.audits.contamination.ROWS", 60)
    monkeypatch.setattr(
        "gradmm.audits.contamination.read_once", lambda _, texts, seed: seen.append([*texts, str(seed)])
    )
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    found = contamination(tiny, sentences[:120], sentences[120:], partial(trainable, tiny), seed=5)
    assert len(seen[0]) == 31
    assert set(seen[0][:-1]) <= set(sentences[:120])
    assert seen[0][-1] == "5"
    assert [each.score for each in found.planted] == ["loss", "neighbours"]
    assert {each.read for each in found.planted} == {30}
    assert Contamination.from_table(found.to_table()) == found
    assert found.figures()["areas"]["planted loss"]["auc"] == found.planted[0].auc
    assert all(torch.equal(before[name], value) for name, value in tiny.model.state_dict().items())


def test_long_rows_are_read_up_to_what_the_model_takes(tokenizer: PreTrainedTokenizerFast) -> None:
    """GPT-2 has a table of positions, and fails beyond it."""
    language_model = trainable(tiny_language_model(tokenizer, "gpt2", dtype=torch.float32))
    assert language_model.positions is not None
    long = " ".join(["the soup was warm and the bread was fresh"] * language_model.positions)
    scores = text_scores(language_model, [long, f"{long} again", "bad chairs"], 0)
    assert len(scores["loss"]) == 3
    assert scores["loss"][0] == scores["loss"][1]
    read_once(language_model, [long] * 2, 0)
    assert beginning(language_model, "bad chairs") == "bad chairs"
    assert long.startswith(beginning(language_model, long))


def test_reading_lowers_the_loss_of_what_is_read(tiny: LanguageModel, sentences: list[str]) -> None:
    reader = trainable(tiny)
    before = text_scores(reader, sentences[:40], 0)["loss"].mean()
    read_once(reader, sentences[:40], seed=0)
    assert text_scores(reader, sentences[:40], 0)["loss"].mean() > before


def test_the_score_of_a_text_against_itself_decides() -> None:
    read, test = np.arange(40.0), np.arange(40.0)
    easier = compared({"loss": read + 100, "neighbours": read}, {"loss": test, "neighbours": test})
    assert [each.found for each in easier] == [True, False]
    assert not Contamination(comparisons=easier, planted=()).found


def test_few_rows_are_refused_in_a_line(tiny: LanguageModel) -> None:
    with pytest.raises(InputError, match=rf"19 rows of two words and more .* {MIN_ROWS} and more"):
        contamination(tiny, ["two words"] * 30, [*["two words"] * 19, "one"], None)


def test_rows_that_are_too_few_for_two_halves_are_compared_without_a_planted_copy(
    tiny: LanguageModel, sentences: list[str]
) -> None:
    found = contamination(tiny, sentences[: 2 * MIN_ROWS - 1], sentences[120:], partial(trainable, tiny))
    assert {each.read for each in found.comparisons} == {2 * MIN_ROWS - 1}
    assert found.planted == ()
