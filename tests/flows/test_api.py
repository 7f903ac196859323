"""`gradmm.distil`: a frame in, texts and their guarantee out; the same root and ledger as the command."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest

import gradmm
from gradmm.errors import BudgetExhausted
from gradmm.lm.model_reference import ModelReference
from tests.flows.test_cli import gradmm as command
from tests.flows.test_own_data import REVIEWS, SMALL

PRIVATE = (
    *SMALL,
    "privacy.delta=1e-3",
    "target_gradient.subspace_dimensions=3",
    "target_gradient.probe_dimensions=2",
    "mechanism_audit={draws: 400, canaries: 20, guesses: 10}",
)


@pytest.fixture
def distil(tmp_path: Path, tiny_model: ModelReference) -> Callable[..., gradmm.Distillation]:
    def run(data: Any, **changes: Any) -> gradmm.Distillation:
        arguments: dict[str, Any] = {"epsilon": None, "settings": SMALL, "root": tmp_path / "root", "quiet": True}
        return gradmm.distil(data, model=Path(tiny_model.name), **arguments | changes)

    return run


#: Values of a type that Parquet does not have.
UNION = pa.UnionArray.from_dense(
    pa.array([0] * len(REVIEWS), pa.int8()),
    pa.array(range(len(REVIEWS)), pa.int32()),
    [pa.array(["secret"] * len(REVIEWS))],
)


def with_class_names(frame: pd.DataFrame) -> datasets.Dataset:
    """Return a data set whose labels are numbers, with the classes' names in its features."""
    return datasets.Dataset.from_pandas(frame).class_encode_column("stars")


@pytest.mark.parametrize("form", [lambda frame: frame, datasets.Dataset.from_pandas, with_class_names])
def test_a_frame_gives_texts(distil: Callable[..., gradmm.Distillation], form: Callable[[Any], Any]) -> None:
    made = distil(form(REVIEWS), text="review", label="stars", name="reviews")
    assert list(made.texts.columns) == ["text", "label", "p_bad", "p_good", "log_perplexity"]
    assert len(made.texts) == 12
    assert made.report.is_file()
    assert made.guarantee.epsilon is None


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (None, "data: NoneType is no table; give a frame, a data set, or the path"),
        ({"text": ["a"], "label": [0]}, "data: dict is no table; give a frame"),
        (REVIEWS["review"], "data: Series is no table; give a frame"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_pandas(REVIEWS)}),
            "data: a data set of the splits train; give one, as data['train']",
        ),
        (pd.concat([REVIEWS, REVIEWS[["review"]]], axis=1), "data: several columns are named 'review'; rename"),
        (
            REVIEWS.assign(stars=[7, *["secret"] * (len(REVIEWS) - 1)]),
            "stars: values of several types, or of one that Parquet does not have; convert the column",
        ),
        (
            REVIEWS.assign(either=pd.Series(UNION, dtype=pd.ArrowDtype(UNION.type))),
            "data: values of several types, or of one that Parquet does not have; convert the column",
        ),
    ],
)
def test_data_that_is_no_table_is_refused(
    distil: Callable[..., gradmm.Distillation], data: Any, line: str
) -> None:
    with pytest.raises(gradmm.InputError, match=re.escape(line)):
        distil(data)


def test_nothing_of_a_frame_is_kept_by_a_call_that_is_refused(
    distil: Callable[..., gradmm.Distillation], tmp_path: Path
) -> None:
    unknown_device = (*SMALL, "model.device=nowhere")  # which the run finds
    for changes in ({"epsilon": -1}, {"settings": ("a.b=1",)}, {"label": "no"}, {"settings": unknown_device}):
        with pytest.raises(gradmm.InputError):
            distil(REVIEWS, **changes)
    assert not [*(tmp_path / "root").rglob("*.parquet")]


def test_instructions_are_what_the_model_goes_on_from(distil: Callable[..., gradmm.Distillation]) -> None:
    made = distil(REVIEWS, instructions={"good": "a good day :\n"})
    by_name = {each.name: each.instruction for each in made.record.recipe.classes}
    assert by_name["good"] == "a good day :\n"
    assert "bad" in by_name["bad"]
    with pytest.raises(gradmm.InputError, match="no class 'great' among 'bad', 'good'"):
        distil(REVIEWS, instructions={"great": "a great day :\n"})


def test_the_ledger_holds_for_frames_too(distil: Callable[..., gradmm.Distillation], tmp_path: Path) -> None:
    first = distil(REVIEWS, epsilon=4, settings=PRIVATE, name="reviews")
    assert first.guarantee.epsilon == 4
    again = distil(REVIEWS, epsilon=4, settings=PRIVATE, name="reviews")
    assert again.guarantee.releases == 1
    assert again.texts.equals(first.texts)
    with pytest.raises(BudgetExhausted, match="above the budget of 4"):
        distil(REVIEWS[:-1], epsilon=4, settings=PRIVATE, name="reviews")
    runs = command("runs", "--root", tmp_path / "root")
    assert first.record.run_id in runs.out
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "root" / "frames").iterdir())


@pytest.mark.parametrize("name", ["Reviews 2024", "../elsewhere/x", "", "a.b"])
def test_a_name_that_cannot_be_is_refused_before_the_frame_is_written(
    distil: Callable[..., gradmm.Distillation], tmp_path: Path, name: str
) -> None:
    with pytest.raises(gradmm.InputError, match="is not a valid name"):
        distil(REVIEWS, name=name)
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(("argument", "error"), [("root", ValueError), ("model", TypeError)])
def test_what_is_no_path_is_refused(tmp_path: Path, argument: str, error: type[Exception]) -> None:
    arguments: Any = {"model": tmp_path, "root": tmp_path, argument: None}
    with pytest.raises(error, match=r"NoneType|None is no path"):
        gradmm.distil(REVIEWS, epsilon=None, **arguments)
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_a_frame_is_said(distil: Callable[..., gradmm.Distillation]) -> None:
    with pytest.raises(gradmm.InputError, match="no column 'body' among the columns 'review', 'stars'"):
        distil(REVIEWS, text="body")
    with pytest.raises(gradmm.InputError, match="data: has values that Parquet cannot hold"):
        distil(REVIEWS.assign(review=pd.Series(["a\ud800b"] * len(REVIEWS), dtype=object)))
    with pytest.raises(gradmm.InputError, match="data: has values that Parquet cannot hold"):
        distil(REVIEWS.assign(stars=pd.arrays.SparseArray([0, 1] * (len(REVIEWS) // 2))))
    with pytest.raises(gradmm.InputError, match="no column '7' among the 2 columns"):
        distil(REVIEWS.set_axis([0, 1], axis=1), text=0, label=7)
    with pytest.raises(gradmm.InputError, match="row 3 has no text"):
        distil(REVIEWS.assign(review=REVIEWS["review"].where(REVIEWS.index != 3)))
    with pytest.raises(gradmm.InputError, match=re.escape("settings: is a text; give a list of them: ['seed=1']")):
        distil(REVIEWS, settings="seed=1")
    with pytest.raises(gradmm.InputError, match="contains no rows"):
        distil(pd.DataFrame({"text": [], "label": []}))
