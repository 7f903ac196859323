from __future__ import annotations

from dataclasses import replace
from math import nan
from random import Random

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.settings import CategoryBalanceSettings, Exemplar, LabelFilterSettings, LossSelectionSettings
from gradmm.filters.category_balance import balance_categories
from gradmm.filters.label_filter import calibrated, filter_labels, without_filter
from gradmm.filters.loss_selection import select_by_loss
from gradmm.filters.rows import filter_figures, kept_texts
from gradmm.filters.subset_selection import TargetSet
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate
from gradmm.target.features import text_means
from tests.conftest import examples, random_probe, tiny_language_model

losses = st.lists(st.floats(0, 2, allow_subnormal=False), min_size=1, max_size=12)


def texts(*by_class: list[float], words: list[str] | None = None) -> pd.DataFrame:
    rows = [
        {"id": f"{label}-{i:05d}", "label": label, "matching_loss": loss, "probe_loss": nan, "log_perplexity": 4.0}
        for label, of_class in enumerate(by_class)
        for i, loss in enumerate(of_class)
    ]
    frame = pd.DataFrame(rows)
    return frame.assign(text=words or frame["id"])


@given(first=losses, second=losses, count=st.integers(1, 12))
def test_loss_selection_keeps_the_lowest_losses_of_each_class(
    first: list[float], second: list[float], count: int
) -> None:
    ranked = select_by_loss(texts(first, second), LossSelectionSettings(per_class=count))
    for label, of_class in enumerate((first, second)):
        kept = ranked[ranked["kept"] & (ranked["label"] == label)]["matching_loss"].tolist()
        assert kept == sorted(of_class)[:count]


def test_loss_selection_drops_duplicates_before_counting_and_keeps_the_best_of_them() -> None:
    frame = texts([0.3, 0.1, 0.2, 0.4], words=["A good day", "a  good DAY", "fine", "well"])
    ranked = select_by_loss(frame, LossSelectionSettings(per_class=3))
    assert ranked[ranked["kept"]]["id"].tolist() == ["0-00001", "0-00002", "0-00003"]
    assert ranked[ranked["id"] == "0-00000"]["reason"].tolist() == ["duplicate"]
    assert ranked["rank"].tolist() == [1, 2, 3, 4]


def test_without_a_number_loss_selection_keeps_all_but_duplicates() -> None:
    frame = texts([0.3, 0.1, 0.2], [0.4], words=["A good day", "a  good DAY", "fine", "a good day"])
    ranked = select_by_loss(frame, LossSelectionSettings())
    assert ranked[ranked["kept"]]["id"].tolist() == ["0-00001", "0-00002", "1-00000"]


def test_loss_selection_drops_near_duplicates_of_better_texts_of_the_class() -> None:
    words = [
        "the soup was warm and the bread was fresh today",
        "a quiet room with good light",
        "the soup was warm and the bread was fresh again",
        "the soup was warm",
    ]
    frame = texts([0.3, 0.2, 0.1, 0.4], [0.5] * 4, words=words * 2)
    ranked = select_by_loss(frame, LossSelectionSettings(per_class=4)).set_index("id")
    assert ranked.loc[["0-00002", "0-00001", "0-00003"], "kept"].all()
    assert ranked.loc["0-00000", "reason"] == "duplicate"  # shares 7 of 9 trigrams with a better one
    assert ranked.loc["1-00002", "reason"] == "duplicate"  # as good as the other one, which has the lower id
    assert ranked["kept"].sum() == 6
    lenient = select_by_loss(frame, LossSelectionSettings(per_class=4, near_duplicate=0.8))
    assert lenient["kept"].all()
    fewer = select_by_loss(frame, LossSelectionSettings(per_class=2)).set_index("id")
    assert fewer[fewer["kept"]].index.tolist() == ["0-00002", "0-00001", "1-00000", "1-00001"]
    assert fewer.loc["0-00003", "reason"] == "higher loss than the texts kept"


def test_texts_without_a_loss_are_selected_by_id_and_all_balanced() -> None:
    words = ["it rains all day here", "a quiet room", "It  rains all day here", "warm soup", "cold soup"]
    frame = texts([nan] * 5, [nan] * 2, words=[*words, *words[:2]]).sample(frac=1, random_state=0)
    ranked = select_by_loss(frame, LossSelectionSettings(per_class=3), probe_weight=1.0)
    assert ranked["id"].tolist() == sorted(frame["id"])
    assert ranked["rank"].tolist() == [1, 2, 3, 4, 5, 1, 2]
    reasons = dict(zip(ranked["id"], ranked["reason"], strict=True))
    assert {text: reason for text, reason in reasons.items() if reason} == {
        "0-00002": "duplicate",
        "0-00004": "more texts than loss_selection.per_class",
    }
    balanced = balance_categories(kept_texts(ranked), CategoryBalanceSettings(floor=1))
    assert balanced["kept"].all()
    figures = filter_figures(balanced)
    assert figures["kept_by_label"] == {"0": 3, "1": 2}
    assert "mean_matching_loss" not in figures


def random_set(count: int, seed: int) -> TargetSet:
    """Make the set of `count` texts with random gradients of three coordinates."""
    random = np.random.default_rng([count, seed])
    gradients = torch.from_numpy(random.normal(size=(count, 3)))
    target = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    return TargetSet(gradients @ gradients.mT, gradients @ target, target.square().sum(), "distance")


@examples(50)
@given(first=losses, second=losses, count=st.integers(1, 6), order=st.randoms(use_true_random=False))
def test_selection_by_set_keeps_what_the_set_chooses_among_texts_that_are_no_duplicates(
    first: list[float], second: list[float], count: int, order: Random
) -> None:
    """A set's rows are its class's texts in the order of the frame, not of their losses."""
    words = [f"w{min(i, 6)}" for i in range(len(first))] + [f"W{min(i, 6)}" for i in range(len(second))]
    rows = list(range(len(words)))
    order.shuffle(rows)
    frame = texts(first, second, words=words).iloc[rows].reset_index(drop=True)
    sets = {label: random_set(len(of_class), label) for label, of_class in enumerate((first, second))}
    ranked = select_by_loss(frame, LossSelectionSettings(per_class=count, by="set"), sets=sets)
    for label in (0, 1):
        of_class = frame[frame["label"] == label].reset_index(drop=True)
        best = of_class.sort_values(["matching_loss", "id"]).drop_duplicates("text").index.tolist()
        expected = of_class.loc[sets[label].choose(count, among=best), "id"]
        verdict = ranked[ranked["label"] == label].set_index("id")
        assert set(verdict[verdict["kept"]].index) == set(expected)
        reasons = dict.fromkeys(of_class["id"], "duplicate")
        reasons |= dict.fromkeys(of_class.loc[best, "id"], "the set matches better without it")
        assert verdict["reason"].to_dict() == reasons | dict.fromkeys(expected, "")


@given(first=losses, second=losses, third=losses, floor=st.integers(1, 5))
def test_category_balance_brings_no_class_above_the_best_unless_at_the_floor(
    first: list[float], second: list[float], third: list[float], floor: int
) -> None:
    classes = [first, second, third]
    balanced = balance_categories(texts(*classes), CategoryBalanceSettings(floor=floor))
    mark = min(sum(c) / len(c) for c in classes)
    for label, of_class in enumerate(classes):
        kept = sorted(balanced[balanced["kept"] & (balanced["label"] == label)]["matching_loss"])
        assert kept == sorted(of_class)[: len(kept)]  # only the worst are dropped
        assert len(kept) >= min(floor, len(of_class))
        if len(kept) > floor:
            assert sum(kept) / len(kept) <= mark + 1e-9
        if len(kept) < len(of_class):  # one more would have been too many
            more = sorted(of_class)[: len(kept) + 1]
            assert sum(more) / len(more) > mark


def test_the_best_class_keeps_all_texts_whatever_the_size_of_the_losses() -> None:
    """Its mean and the last of its running means differ by rounding."""
    random = np.random.default_rng(0)
    for size in (1e-6, 1.0, 1e4, 1e8):
        for _ in range(50):
            best = size * random.random(50)
            balanced = balance_categories(texts(best.tolist(), (9 * best).tolist()), CategoryBalanceSettings())
            assert balanced[balanced["label"] == 0]["kept"].all()


def test_category_balance_can_be_switched_off() -> None:
    settings = CategoryBalanceSettings(enabled=False)
    assert balance_categories(texts([0.1], [0.9]), settings)["kept"].all()


def test_label_filter_shows_the_exemplars_and_keeps_what_the_model_agrees_with(
    phi: LanguageModel, prompt_template: PromptTemplate, template: TokenisedTemplate
) -> None:
    frame = texts(
        [0.1] * 3, [0.1] * 3, words=["cold soup", "a smell", "late", "good light", "fresh bread", "warm"]
    )
    frame["token_ids"] = frame["text"].map(phi.encode)
    exemplars = (Exemplar(text="rude staff", label=0), Exemplar(text="a great book", label=1))
    settings = LabelFilterSettings(exemplars=exemplars, enabled=True, calibrated=False)
    judged = filter_labels(phi, prompt_template, template, frame, settings)
    for row in judged.to_dict("records"):
        prompt = f"rude staff It was bad\na great book It was good\n{row['text']} It was"
        logits = phi.model(**phi.tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        pair = logits[[phi.encode(" bad")[0], phi.encode(" good")[0]]].softmax(dim=0)
        assert row["predicted"] == int(pair.argmax())
        assert row["probability"] == pytest.approx(float(pair[row["label"]]), rel=1e-6)
        assert row["kept"] == (row["predicted"] == row["label"])
    assert judged["kept"].nunique() == 2
    off = without_filter(frame)
    assert off["kept"].all()
    assert off["predicted"].isna().all()
    assert set(off.columns) == set(judged.columns)


def test_a_calibrated_filter_ignores_the_models_preference_over_all_texts(
    tokenizer, prompt_template: PromptTemplate, template: TokenisedTemplate
) -> None:
    words = ["cold soup", "a smell", "late", "good light", "fresh bread", "warm"]
    frame = texts([0.1] * 3, [0.1] * 3, words=words)

    def judged(bias: float, calibrated: bool) -> pd.DataFrame:
        model = tiny_language_model(tokenizer, "phi")
        model.model.lm_head.bias.data[model.encode(" good")[0]] += bias
        given = frame.assign(token_ids=frame["text"].map(model.encode))
        return filter_labels(
            model, prompt_template, template, given, LabelFilterSettings(enabled=True, calibrated=calibrated)
        )

    fair, biased = judged(0.0, calibrated=True), judged(20.0, calibrated=True)
    assert fair["predicted"].tolist() == biased["predicted"].tolist()
    assert fair["probability"].tolist() == pytest.approx(biased["probability"].tolist())
    assert fair["kept"].nunique() == 2
    assert judged(20.0, calibrated=False)["predicted"].unique().tolist() == [1]


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_probe_and_the_model_add_their_log_probabilities(
    calibrated: bool, phi: LanguageModel, prompt_template: PromptTemplate, template: TokenisedTemplate
) -> None:
    words = ["cold soup", "a smell", "late", "good light", "fresh bread of today", "warm"]
    frame = texts([0.1] * 3, [0.1] * 3, words=words)
    frame["token_ids"] = frame["text"].map(phi.encode)
    settings, probe = (
        LabelFilterSettings(enabled=True, calibrated=calibrated, batch_size=2),
        random_probe(phi, template),
    )
    alone = filter_labels(phi, prompt_template, template, frame, settings)
    both = filter_labels(phi, prompt_template, template, frame, settings, probe)
    for before, row in zip(alone["probability"], both.to_dict("records"), strict=True):
        layers = phi.layers(input_ids=torch.tensor([row["token_ids"]]))
        means = text_means(layers, torch.ones(1, len(row["token_ids"]), dtype=torch.bool))
        log_odds = torch.logit(torch.tensor(before, dtype=torch.float64)) + torch.logit(
            torch.exp(-probe.losses(means, row["label"]).double())
        )
        assert row["probability"] == pytest.approx(float(torch.sigmoid(log_odds)), abs=1e-6)
        assert row["kept"] == (row["predicted"] == row["label"]) == (row["probability"] > 0.5)
    assert alone["kept"].tolist() != both["kept"].tolist()


def test_a_uniform_probe_leaves_the_decision_to_the_model(
    phi: LanguageModel, prompt_template: PromptTemplate, template: TokenisedTemplate
) -> None:
    frame = texts([0.1] * 2, [0.1] * 2, words=["cold soup", "a smell", "late", "warm"])
    frame["token_ids"] = frame["text"].map(phi.encode)
    sure = random_probe(phi, template)
    nothing = replace(sure, weights=0 * sure.weights, biases=0 * sure.biases, shrinkage=0.0)
    alone, both = (
        filter_labels(phi, prompt_template, template, frame, LabelFilterSettings(enabled=True), probe)
        for probe in (None, nothing)
    )
    pd.testing.assert_frame_equal(alone, both)


@given(
    logits=st.lists(st.tuples(*[st.floats(-20, 20)] * 3), min_size=3, max_size=9),
    shift=st.tuples(*[st.floats(-5, 5)] * 3),
)
def test_calibrated_probabilities_prefer_no_class_on_average(logits: list, shift: tuple) -> None:
    own = torch.arange(len(logits)) % 3
    raw = torch.tensor(logits, dtype=torch.float64)
    found = calibrated(raw.softmax(dim=1), own)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(len(raw), dtype=torch.float64))
    # Classes have equal weight, whatever their number of texts.
    of_class = torch.stack([found.log()[own == column].mean(dim=0) for column in range(3)]).mean(dim=0)
    torch.testing.assert_close(of_class, of_class.mean().expand(3), rtol=1e-9, atol=1e-9)
    shifted = calibrated((raw + torch.tensor(shift, dtype=torch.float64)).softmax(dim=1), own)
    torch.testing.assert_close(shifted, found, rtol=1e-6, atol=1e-12)


def test_a_class_without_texts_left_is_counted() -> None:
    frame = texts([0.1], [0.2]).assign(kept=[True, False], reason="")
    assert kept_texts(frame)["id"].tolist() == ["0-00000"]
    figures = filter_figures(frame)
    assert figures["kept_by_label"] == {"0": 1, "1": 0}
    assert figures["texts"] == 1
    assert filter_figures(frame.assign(kept=False)) == {"kept": 0, "kept_by_label": {"0": 0, "1": 0}}


def test_the_probes_loss_counts_with_its_weight() -> None:
    frame = texts([0.1, 0.2, 0.3]).assign(probe_loss=[1.0, 0.5, 0.1])
    settings = LossSelectionSettings(per_class=1)

    def kept(weight: float) -> str:
        return select_by_loss(frame, settings, weight).query("kept")["id"].item()

    assert [kept(weight) for weight in (0.0, 0.21, 1.0)] == ["0-00000", "0-00001", "0-00002"]
