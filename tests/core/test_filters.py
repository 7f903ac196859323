from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm_core.category_balance import balance_categories
from gradmm_core.errors import InputError
from gradmm_core.filters import filter_figures, kept_texts
from gradmm_core.label_filter import filter_labels
from gradmm_core.language_model import LanguageModel
from gradmm_core.loss_selection import select_by_loss
from gradmm_core.settings import CategoryBalanceSettings, Exemplar, LabelFilterSettings, LossSelectionSettings
from gradmm_core.template import ResponseTemplate, TokenisedTemplate

losses = st.lists(st.floats(0, 2, allow_subnormal=False), min_size=1, max_size=12)


def texts(*by_class: list[float], words: list[str] | None = None) -> pd.DataFrame:
    rows = [
        {"id": f"{label}-{i:05d}", "label": label, "matching_loss": loss, "log_perplexity": 4.0}
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


@given(first=losses, second=losses, third=losses, floor=st.integers(1, 5))
def test_category_balance_brings_no_class_above_the_best_unless_at_the_floor(
    first: list[float], second: list[float], third: list[float], floor: int
) -> None:
    classes = [first, second, third]
    balanced = balance_categories(texts(*classes), CategoryBalanceSettings(floor=floor))
    mark = min(sum(c) / len(c) for c in classes)
    for label, of_class in enumerate(classes):
        kept = sorted(balanced[balanced["kept"] & (balanced["label"] == label)]["matching_loss"])
        assert kept == sorted(of_class)[: len(kept)]  # only the worst go
        assert len(kept) >= min(floor, len(of_class))
        if len(kept) > floor:
            assert sum(kept) / len(kept) <= mark + 1e-9
        if len(kept) < len(of_class):  # one more would have been too many
            more = sorted(of_class)[: len(kept) + 1]
            assert sum(more) / len(more) > mark


def test_category_balance_can_be_switched_off() -> None:
    settings = CategoryBalanceSettings(enabled=False)
    assert balance_categories(texts([0.1], [0.9]), settings)["kept"].all()


def test_label_filter_shows_the_exemplars_and_keeps_what_the_model_agrees_with(
    phi: LanguageModel, wording: ResponseTemplate, template: TokenisedTemplate
) -> None:
    frame = texts(
        [0.1] * 3, [0.1] * 3, words=["cold soup", "a smell", "late", "good light", "fresh bread", "warm"]
    )
    frame["token_ids"] = frame["text"].map(phi.encode)
    exemplars = (Exemplar(text="rude staff", label=0), Exemplar(text="a great book", label=1))
    judged = filter_labels(phi, wording, template, frame, LabelFilterSettings(exemplars=exemplars))
    for row in judged.itertuples():
        prompt = f"rude staff It was bad\na great book It was good\n{row.text} It was"
        logits = phi.model(**phi.tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        pair = logits[[phi.encode(" bad")[0], phi.encode(" good")[0]]].softmax(dim=0)
        assert row.predicted == int(pair.argmax())
        assert row.probability == pytest.approx(float(pair[row.label]), rel=1e-6)
        assert row.kept == (row.predicted == row.label)
    assert judged["kept"].nunique() == 2
    off = LabelFilterSettings(exemplars=exemplars, enabled=False)
    assert filter_labels(phi, wording, template, frame, off)["kept"].all()


def test_a_class_without_texts_left_is_named() -> None:
    frame = texts([0.1], [0.2]).assign(kept=[True, False], reason="")
    assert kept_texts(frame)["id"].tolist() == ["0-00000"]
    with pytest.raises(
        InputError, match=r"label_filter: no text of label 1 is left after label_filter; generate more"
    ):
        filter_figures(frame, "label_filter")
