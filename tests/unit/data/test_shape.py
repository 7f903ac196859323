"""Reading a data set's shape for a new recipe, which must not contain any of its texts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from gradmm.data.shape import DataShape, shape_of
from gradmm.errors import InputError

REVIEWS = pd.DataFrame(
    {
        "id": range(120),
        "review": [f"secret text number {i}, of six or more words" for i in range(120)],
        "stars": ["bad", "so-so", "good"] * 40,
    }
)


def write(frame: pd.DataFrame, file: Path) -> str:
    if file.suffix == ".csv":
        frame.to_csv(file, index=False)
    elif file.suffix == ".jsonl":
        frame.to_json(file, orient="records", lines=True)
    else:
        frame.to_parquet(file)
    return str(file)


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.parquet"])
def test_columns_classes_and_sizes_are_found(tmp_path: Path, name: str) -> None:
    assert shape_of(write(REVIEWS, tmp_path / name), None, None) == DataShape(
        path=str(tmp_path / name),
        splits={"train": "train", "validation": None, "test": None},
        unlabelled=(),
        text_column="review",
        label_column="stars",
        label_names=("bad", "good", "so-so"),
        class_names={0: "bad", 1: "good", 2: "so-so"},
        rows=120,
        words=16,
        language="english",
    )


@pytest.mark.parametrize("withheld", [{"stars": "unknown"}, None])
def test_a_split_without_the_labels_is_left_out(tmp_path: Path, withheld: dict[str, str] | None) -> None:
    write(REVIEWS, tmp_path / "train.csv")
    write(REVIEWS, tmp_path / "validation.csv")
    test = REVIEWS.assign(**withheld) if withheld else REVIEWS.drop(columns="stars")
    write(test, tmp_path / "test.csv")
    shape = shape_of(str(tmp_path), None, None)
    assert shape.splits == {"train": "train", "validation": "validation", "test": None}
    assert shape.unlabelled == ("test",)


def test_labels_of_another_type_in_another_split_are_the_same_labels(tmp_path: Path) -> None:
    """A gap makes whole numbers decimal ones."""
    frame = pd.DataFrame({"text": [f"row {i} it is" for i in range(40)], "label": [i % 2 for i in range(40)]})
    write(frame, tmp_path / "train.parquet")
    write(frame.assign(label=frame["label"].astype(float).where(frame.index > 0)), tmp_path / "test.parquet")
    assert shape_of(str(tmp_path), None, None).splits["test"] == "test"


@pytest.mark.parametrize(
    ("texts", "language"),
    [
        (["a day out", "a café, at 5 °C", *["“so it is” – it cost 5 €"] * 18], "english"),
        (["für und wider", "so ist es", "das war gut"], "any"),
        (["это хорошо", "это плохо"], "any"),
    ],
)
def test_letters_tell_english_from_other_languages(tmp_path: Path, texts: list[str], language: str) -> None:
    frame = pd.DataFrame({"text": texts * 20, "label": [0, 1] * (10 * len(texts))})
    assert shape_of(write(frame, tmp_path / "r.csv"), "text", "label").language == language


def test_no_text_is_part_of_the_shape(tmp_path: Path) -> None:
    assert "secret" not in str(dataclasses.asdict(shape_of(write(REVIEWS, tmp_path / "r.csv"), None, None)))


@pytest.mark.parametrize(("rows", "rounded"), [(7, 7), (99, 99), (120, 120), (1234, 1200), (98765, 99000)])
def test_rows_are_rounded_to_two_digits(tmp_path: Path, rows: int, rounded: int) -> None:
    frame = pd.DataFrame({"text": [f"row {i}" for i in range(rows)], "label": [i % 2 for i in range(rows)]})
    assert shape_of(write(frame, tmp_path / "r.parquet"), None, None).rows == rounded


def test_integers_from_zero_on_are_labels(tmp_path: Path) -> None:
    frame = REVIEWS.assign(stars=[1, 3, 5] * 40)
    shape = shape_of(write(frame, tmp_path / "r.csv"), "review", "stars")
    assert shape.label_names is None
    assert shape.class_names == {1: "1", 3: "3", 5: "5"}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([-1, 1], ("-1", "1")),
        ([True, False], ("false", "true")),
        ([0.5, 1.0], ("0.5", "1")),
        (["b ", "a"], ("a", "b")),
    ],
)
def test_all_other_values_are_names_of_labels(tmp_path: Path, values: list, names: tuple[str, ...]) -> None:
    shape = shape_of(write(REVIEWS.assign(stars=values * 60), tmp_path / "r.parquet"), None, "stars")
    assert shape.label_names == names


def test_class_names_that_a_data_set_declares_are_used(tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"text": [f"text {i}" for i in range(10)], "label": [0, 1] * 5}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.to_parquet(str(tmp_path / "train.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path, tmp_path / "train.parquet", tmp_path / "saved"):
        shape = shape_of(str(path), None, None)
        assert (shape.label_names, shape.class_names) == (None, {0: "no", 1: "yes"})


def test_splits_are_found_by_their_usual_names(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write(REVIEWS, tmp_path / f"{split}.parquet")
    assert shape_of(str(tmp_path), None, None).splits == {"train": "train", "validation": "dev", "test": "test"}


def two_texts(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(answer=[f"another text {i} of several words" for i in range(120)], stars=[0, 1] * 60)


@pytest.mark.parametrize(
    ("change", "columns", "problem"),
    [
        (
            lambda frame: frame.rename(columns={"review": "a"}).pipe(two_texts),
            {},
            "the text column cannot be told: it may be",
        ),
        (
            lambda frame: frame.drop(columns="review"),
            {},
            "the text column cannot be told: it seems to be none of the",
        ),
        (lambda frame: frame[["review"]], {}, "has one column; give texts and labels in columns of their own"),
        (lambda frame: frame.drop(columns="stars"), {}, "the label column cannot be told: it seems to be none of"),
        (lambda frame: frame, {"text_column": "txt"}, "no column 'txt' among the columns 'id', 'review', 'stars'"),
        (
            lambda frame: frame,
            {"label_column": "id"},
            "the column 'id' has 120 values; a label column has 2 to 50",
        ),
        (
            lambda frame: frame.assign(stars="good"),
            {},
            "the column 'stars' has 1 values; a label column has 2 to 50",
        ),
        (lambda frame: frame.assign(stars=None), {}, "the column 'stars' holds null, not labels"),
        (lambda frame: frame[:0], {}, "contains no rows"),
        (lambda frame: frame, {"text_column": "id"}, "the column 'id' holds int64, not text; name another"),
        (
            lambda frame: frame.assign(review=[["secret"]] * 120),
            {"text_column": "review"},
            "the column 'review' holds list<element: string>, not text",
        ),
    ],
)
def test_data_without_texts_or_classes_are_refused(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], columns: dict[str, Any], problem: str
) -> None:
    path = write(change(REVIEWS), tmp_path / "r.parquet")
    with pytest.raises(InputError) as caught:
        shape_of(path, columns.get("text_column"), columns.get("label_column"))
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_label_in_the_place_of_a_header_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("a text of some words,secret\nanother text,other\none more text,third\n")
    with pytest.raises(InputError) as caught:
        shape_of(str(tmp_path / "r.csv"), None, None)
    assert "their names look like values; is the header missing?" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        ("a warm soup,good", "cold soup,bad\ngood bread,good\nrude staff,bad\na good day,good\n"),
        ("a warm soup,1", "cold soup,0\ngood bread,1\nrude staff,0\na good day,1\n"),
        (f"{'a very ' * 8} warm soup,great", "cold soup,bad\ngood bread,good\nrude staff,bad\na good day,good\n"),
    ],
)
def test_a_record_in_the_place_of_a_header_is_refused_and_not_quoted(
    tmp_path: Path, first: str, rest: str
) -> None:
    """The names of the columns are part of the recipe, and so of every release."""
    file = tmp_path / "train.csv"
    file.write_text(f"{first}\n{rest}")
    with pytest.raises(InputError, match="seems to have values instead of columns' names") as refused:
        shape_of(str(file), None, None)
    assert "soup" not in str(refused.value)
    text, label = first.split(",")
    assert shape_of(str(file), text, label).text_column == text  # who names them knows them
    file.write_text(f"text,label\n{first}\n{rest}")
    assert shape_of(str(file), None, None).text_column == "text"


def test_texts_may_be_missing(tmp_path: Path) -> None:
    frame = REVIEWS.assign(review=pd.Series([None] * 120, dtype="string"))
    assert shape_of(write(frame, tmp_path / "r.parquet"), "review", None).words == 8


def test_a_folder_without_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a data file nor a folder with a file for the split train"):
        shape_of(str(tmp_path), None, None)


def test_rows_without_a_label_are_no_class(tmp_path: Path) -> None:
    labels = [0.0, 1.0, float("nan")] * 40
    table = pa.table({"text": REVIEWS["review"], "label": pa.array(labels)})
    pq.write_table(table, tmp_path / "r.parquet")
    assert shape_of(str(tmp_path / "r.parquet"), None, None).class_names == {0: "0", 1: "1"}
    rows = [{"text": text, "label": label} for text, label in zip(REVIEWS["review"], labels, strict=True)]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    assert shape_of(str(tmp_path / "r.json"), None, None).class_names == {0: "0", 1: "1"}


def test_columns_that_are_not_used_may_have_one_name(tmp_path: Path) -> None:
    lines = ["review,stars,,", *(f"{text.replace(',', '')},{stars},x,y" for _, text, stars in REVIEWS.values)]
    (tmp_path / "r.csv").write_text("\n".join(lines))
    assert shape_of(str(tmp_path / "r.csv"), None, None).label_names == ("bad", "good", "so-so")


def test_files_of_different_columns_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write(REVIEWS, tmp_path / "train" / "a.parquet")
    write(REVIEWS.assign(stars=1), tmp_path / "train" / "b.parquet")
    with pytest.raises(InputError, match=r"and different types, .*; give all files") as caught:
        shape_of(str(tmp_path), None, None)
    assert "\n" not in str(caught.value)
