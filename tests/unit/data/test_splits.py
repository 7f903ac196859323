"""Reading and splitting labelled texts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradmm.config.settings import DataSettings
from gradmm.data import sources
from gradmm.data.splits import LabelledTexts, Splits, load_splits
from gradmm.errors import InputError

ROWS = [(f"text number {i}", i % 2) for i in range(40)]


def table_of(rows: list[tuple[str, int]]) -> pa.Table:
    return pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})


def write_parquet(table: pa.Table, file: Path) -> None:
    pq.write_table(table, file.with_suffix(".parquet"))


def write_csv(table: pa.Table, file: Path) -> None:
    table.to_pandas().to_csv(file.with_suffix(".csv"), index=False)


def write_jsonl(table: pa.Table, file: Path) -> None:
    table.to_pandas().to_json(file.with_suffix(".jsonl"), orient="records", lines=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with valid test and validation splits. The tests write train."""
    write_parquet(table_of(ROWS), tmp_path / "test")
    write_parquet(table_of(ROWS), tmp_path / "validation")
    return tmp_path


def load(folder: Path, labels: tuple[int, ...] = (0, 1), seed: int = 0, **settings: Any) -> Splits:
    settings = {"validation_split": "validation"} | settings
    return load_splits(DataSettings(path=str(folder), **settings), labels, seed)


def refusal(folder: Path, **arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(folder, **arguments)
    lines = str(caught.value).split("\n")
    assert len(set(lines)) == len(lines)
    assert all(line.count("; ") for line in lines)  # each says what to do
    return str(caught.value)


def rows_of(part: LabelledTexts) -> list[tuple[str, int]]:
    return list(zip(part.texts, part.labels, strict=True))


# --- Reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_jsonl])
def test_rows_are_read_as_written(folder: Path, write: Callable[[pa.Table, Path], None]) -> None:
    rows = [('a "quoted", comma', 0), ("two\nlines", 1), ("déjà vu — 日本語 🙂", 1), ("NA", 0), ("null", 1)]
    write(table_of(rows), folder / "train")
    assert rows_of(load(folder).train) == rows


def test_json_lines_may_be_called_json(folder: Path) -> None:
    (folder / "train.json").write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n')
    assert rows_of(load(folder).train) == [("a", 0), ("b", 1)]


def test_texts_are_stripped(folder: Path) -> None:
    write_parquet(table_of([("  a b ", 0), ("c \t\n", 1)]), folder / "train")
    assert load(folder).train.texts == ("a b", "c")


def test_a_split_may_be_in_numbered_parts(folder: Path) -> None:
    write_parquet(table_of(ROWS[:10]), folder / "train-00000-of-00002-0a1b2c.parquet")
    write_parquet(table_of(ROWS[10:]), folder / "train-00001-of-00002-0a1b2c.parquet")
    assert rows_of(load(folder).train) == ROWS


def test_a_split_may_be_a_folder_of_files(folder: Path) -> None:
    (folder / "train").mkdir()
    write_csv(table_of(ROWS[:10]), folder / "train" / "a")
    write_parquet(table_of(ROWS[10:]), folder / "train" / "b")
    assert rows_of(load(folder).train) == ROWS


def test_folders_named_name_equals_value_add_no_columns(tmp_path: Path) -> None:
    folder = tmp_path / "label=7"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        write_parquet(table_of(ROWS), folder / split)
    assert rows_of(load(folder).train) == ROWS


def test_a_split_with_the_same_name_prefix_is_not_a_part(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train.parquet")
    write_parquet(table_of(ROWS), folder / "train-extra.parquet")
    assert len(load(folder).train) == len(ROWS)


def test_columns_may_have_other_names(folder: Path) -> None:
    for split in ("train", "validation", "test"):
        write_parquet(pa.table({"review": ["a", "b"], "stars": [0, 1]}), folder / split)
    assert rows_of(load(folder, text_column="review", label_column="stars").train) == [("a", 0), ("b", 1)]


def test_sentence_is_a_text_column(folder: Path) -> None:
    write_parquet(table_of(ROWS).rename_columns(["sentence", "label"]), folder / "train")
    assert rows_of(load(folder).train) == ROWS


@pytest.mark.parametrize(
    "labels",
    [
        pa.array(["0", "1"]),
        pa.array([0.0, 1.0]),
        pa.array([0, 1], pa.uint8()),
        pa.array(["0", "1"]).dictionary_encode(),
    ],
)
def test_labels_may_be_written_in_any_type_that_holds_integers(folder: Path, labels: pa.Array) -> None:
    write_parquet(pa.table({"text": ["a", "b"], "label": labels}), folder / "train")
    assert load(folder).train.labels == (0, 1)


def test_text_may_be_dictionary_encoded(folder: Path) -> None:
    write_parquet(pa.table({"text": pa.array(["a", "b"]).dictionary_encode(), "label": [0, 1]}), folder / "train")
    assert load(folder).train.texts == ("a", "b")


def test_a_csv_type_is_inferred_from_the_whole_file(folder: Path) -> None:
    numbers = "".join(f"{i % 10},{i % 2}\n" for i in range(400_000))
    (folder / "train.csv").write_text(f"text,label\n{numbers}at last a text,1\n")
    assert load(folder).train.texts[-1] == "at last a text"


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_jsonl])
def test_a_text_may_be_long(folder: Path, write: Callable[[pa.Table, Path], None]) -> None:
    rows = [("long\n" * 1_000_000 + "indeed", 0), ("short", 1)]
    write(table_of(rows), folder / "train")
    assert rows_of(load(folder).train) == rows


def test_a_json_file_may_be_an_array_of_records(folder: Path) -> None:
    (folder / "train.json").write_text(' [{"text": "a", "label": 0},\n {"label": 1, "text": "b"}]')
    assert rows_of(load(folder).train) == [("a", 0), ("b", 1)]


def test_a_tsv_file_has_tabs_between_its_fields(folder: Path) -> None:
    (folder / "train.tsv").write_text("text\tlabel\na, b\t0\nc\t1\n")
    assert rows_of(load(folder).train) == [("a, b", 0), ("c", 1)]


def test_a_byte_order_mark_is_no_part_of_the_first_column(folder: Path) -> None:
    (folder / "train.csv").write_bytes("text,label\na,0\nb,1\n".encode("utf-8-sig"))
    assert rows_of(load(folder).train) == [("a", 0), ("b", 1)]


# --- Data as people have them -------------------------------------------------------------------------------

REVIEWS = pd.DataFrame({"review": [f"review {i}" for i in range(60)], "stars": ["bad", "so-so", "good "] * 20})
OF_REVIEWS: dict[str, Any] = {
    "text_column": "review",
    "label_column": "stars",
    "label_names": ("bad", "so-so", "good"),
    "validation_split": None,
    "test_split": None,
    "validation_rows": 10,
    "test_rows": 10,
}


def save_csv(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path / "reviews.csv", index=False)
    return path / "reviews.csv"


def save_jsonl(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_json(path / "reviews.jsonl", orient="records", lines=True)
    return path / "reviews.jsonl"


def save_parquet(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_parquet(path / "reviews.parquet")
    return path / "reviews.parquet"


def save_dataset(frame: pd.DataFrame, path: Path) -> Path:
    datasets.Dataset.from_pandas(frame).save_to_disk(str(path / "saved"))
    return path / "saved"


def save_splits(frame: pd.DataFrame, path: Path) -> Path:
    datasets.DatasetDict({"train": datasets.Dataset.from_pandas(frame)}).save_to_disk(str(path / "saved"))
    return path / "saved"


def save_as_on_the_hub(frame: pd.DataFrame, path: Path) -> Path:
    (path / "data").mkdir()
    (path / "README.md").write_text("# Reviews")
    frame[:30].to_parquet(path / "data" / "train-00000-of-00002.parquet")
    frame[30:].to_parquet(path / "data" / "train-00001-of-00002.parquet")
    return path


@pytest.mark.parametrize(
    "save", [save_csv, save_jsonl, save_parquet, save_dataset, save_splits, save_as_on_the_hub]
)
def test_one_split_in_any_form_gives_three(tmp_path: Path, save: Callable[[pd.DataFrame, Path], Path]) -> None:
    splits = load(save(REVIEWS, tmp_path), labels=(0, 1, 2), **OF_REVIEWS)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [40, 10, 10]
    rows = [*rows_of(splits.train), *rows_of(splits.validation), *rows_of(splits.test)]
    assert sorted(rows) == sorted((f"review {i}", i % 3) for i in range(60))


def test_the_splits_of_a_saved_data_set_are_read_by_name(tmp_path: Path) -> None:
    parts: Any = {
        split: datasets.Dataset.from_dict({"text": [f"{split} {i}" for i in range(4)], "label": [0, 1, 0, 1]})
        for split in ("train", "validation", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert load(tmp_path / "saved").test.texts == tuple(f"test {i}" for i in range(4))
    assert "no split 'dev' among 'train', 'validation', 'test'" in refusal(tmp_path / "saved", test_split="dev")


def test_a_file_holds_no_other_split(tmp_path: Path) -> None:
    file = save_csv(REVIEWS, tmp_path)
    message = refusal(file, labels=(0, 1, 2), **OF_REVIEWS | {"test_split": "test"})
    assert "reviews.csv: holds one split, so there is no split 'test'; set data.test_split=null" in message


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "reviews.xlsx").write_bytes(b"PK")
    message = refusal(tmp_path / "reviews.xlsx", **OF_REVIEWS)
    assert "files that end in '.xlsx' are not read; convert it to one of .parquet, .csv" in message


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["no", "yes"] * 2, ("no", "yes")),
        (pa.array(["no", "yes"] * 2).dictionary_encode(), ("no", "yes")),
        ([False, True] * 2, ("false", "true")),
        ([-1, 1] * 2, ("-1", "1")),
        ([0.5, 2.0] * 2, ("0.5", "2")),
        ([" 1 star", "5 stars"] * 2, ("1 star", "5 stars")),
        (["1 star", "5 stars"] * 2, (" 1 star", "5 stars ")),
        ([False, True] * 2, ("False", "True")),
        ([1, 2] * 2, ("01", "02")),
        ([1, 2] * 2, ("1.0", "2.0")),
    ],
)
def test_labels_may_have_names(folder: Path, values: Any, names: tuple[str, ...]) -> None:
    for split in ("train", "validation", "test"):
        write_parquet(pa.table({"text": ["a", "b", "c", "d"], "label": values}), folder / split)
    assert load(folder, label_names=names).train.labels == (0, 1, 0, 1)
    assert load(folder, label_names=names[::-1]).train.labels == (1, 0, 1, 0)


def test_booleans_are_labels(folder: Path) -> None:
    write_parquet(pa.table({"text": ["a", "b"], "label": [True, False]}), folder / "train")
    assert load(folder).train.labels == (1, 0)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("Bad", "a label that is not among data.label_names (and 1 more rows); add it there, or set data.drop_"),
        ("bad.", "a label that is not among data.label_names (and 1 more rows); add it there, or set data.drop_"),
        ("", "no label (and 1 more rows); remove the row, or give it a label"),
    ],
)
def test_a_label_without_a_name_is_refused(tmp_path: Path, value: str, problem: str) -> None:
    frame = pd.concat([REVIEWS, pd.DataFrame({"review": ["x", "y"], "stars": [value, value]})])
    message = refusal(save_parquet(frame, tmp_path), labels=(0, 1, 2), **OF_REVIEWS)
    assert f"row 60 has {problem}" in message


@pytest.mark.parametrize("gap", ["", None])
def test_other_values_are_dropped_on_request_but_no_gaps(tmp_path: Path, gap: Any) -> None:
    more = pd.DataFrame({"review": ["x", "y"], "stars": ["Bad", "?"]})
    data = save_parquet(pd.concat([REVIEWS, more]), tmp_path)
    own = load(data, labels=(0, 1, 2), **OF_REVIEWS, drop_other_labels=True)
    parts = (own.train, own.validation, own.test)
    assert {text for part in parts for text in part.texts} == set(REVIEWS["review"])
    frame = pd.concat([REVIEWS, more.assign(stars=["Bad", gap])])
    message = refusal(save_parquet(frame, tmp_path), labels=(0, 1, 2), **OF_REVIEWS, drop_other_labels=True)
    assert "row 61 has no label" in message


def test_all_problems_are_said_together(folder: Path) -> None:
    write_parquet(text_and_label(["a", None, None, "b"], ["0", "1", "x", "1"]), folder / "train")
    write_parquet(text_and_label(["a", " ", "c"], [0, 1, 7]), folder / "validation")
    (folder / "test.parquet").write_bytes(b"")
    lines = refusal(folder).split("\n")
    assert len(lines) == 5
    for problem in (
        "train.parquet: row 1 has no text (and 1 more rows)",
        "train.parquet: row 2 has a label that is not an integer",
        "validation.parquet: row 1 has an empty text",
        "validation.parquet: row 2 has a label that belongs to no class",
        "test.parquet: cannot be read (Parquet file size is 0 bytes)",
    ):
        assert any(problem in line for line in lines), problem


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_jsonl])
def test_a_file_is_the_same_in_parts(
    folder: Path, write: Callable[[pa.Table, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"text {number}", number % 2) for number in range(20)]
    write(table_of(rows), folder / "train")
    whole = load(folder).train
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 3)
    assert load(folder).train == whole
    assert rows_of(whole) == rows


def test_problems_of_all_parts_are_said_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str | None] = [f"text {number}" for number in range(20)]
    texts[4] = texts[11] = texts[19] = None
    texts[7] = " "
    labels = [number % 2 for number in range(20)]
    labels[13], labels[14] = 7, 8
    write_parquet(text_and_label(texts, labels), folder / "train")
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 3)
    lines = refusal(folder).split("\n")
    assert len(lines) == 3
    assert "row 4 has no text (and 2 more rows)" in lines[0]
    assert "row 7 has an empty text;" in lines[1]
    assert "row 13 has a label that belongs to no class (and 1 more rows)" in lines[2]


# --- Refusals -----------------------------------------------------------------------------------------------


def text_and_label(text: Any, label: Any) -> pa.Table:
    return pa.table({"text": text, "label": label})


@pytest.mark.parametrize(
    ("table", "problem", "fix"),
    [
        (table_of(ROWS).slice(0, 0), "contains no rows", "add rows"),
        (
            pa.table({"a": ["x"], "b": [0]}),
            "neither of 'text' and 'sentence' found among the columns 'a', 'b'",
            "data.text_",
        ),
        (
            pa.table({"text": ["x"], "sentence": ["x"], "label": [0]}),
            "both of 'text' and 'sentence'",
            "data.text_",
        ),
        (
            pa.table({"text": ["x"], "y": [0]}),
            "no column 'label' among the columns 'text', 'y'",
            "data.label_",
        ),
        (
            pa.table([["x"], [0], [1]], names=["text", "label", "label"]),
            "2 columns are called 'label'",
            "rename",
        ),
        (text_and_label([1, 2], [0, 1]), "the column 'text' holds int64, not text", "set data.text_column"),
        (
            text_and_label([["x"]], [0]),
            "the column 'text' holds list<element: string>, not text",
            "data.text_",
        ),
        (text_and_label([float("nan")], [0]), "the column 'text' holds double, not text", "data.text_column"),
        (text_and_label([b"x"], [0]), "the column 'text' holds binary, not text", "set data.text_column"),
        (
            text_and_label(["x"], [[0]]),
            "the column 'label' holds list<element: int64>, not labels",
            "data.lab",
        ),
        (
            text_and_label(["x"], pa.array([0], pa.timestamp("us"))),
            "the column 'label' holds timestamp[us], not labels",
            "set data.label_column",
        ),
        (text_and_label(["x", None], [0, 1]), "row 1 has no text", "remove the row"),
        (text_and_label(["x", "y", "z"], [0, 1, None]), "row 2 has no label", "remove the row"),
        (text_and_label(["x"], pa.nulls(1)), "row 0 has no label", "remove the row"),
        (text_and_label(["x", "y"], pa.array([0.0, float("nan")])), "row 1 has no label", "remove the row"),
        (text_and_label(["x", "y"], [0, 0.5]), "row 1 has a label that is not an integer", "data.label_names"),
        (
            text_and_label(["x", "y"], [0, float("inf")]),
            "row 1 has a label that is not an integer",
            "data.label_names",
        ),
        (
            text_and_label(["x", "y"], ["0", "good"]),
            "row 1 has a label that is not an integer",
            "data.label_names",
        ),
        (
            text_and_label(["x", "y", "z"], [0, 1, 2]),
            "row 2 has a label that belongs to no class",
            "add a class",
        ),
        (text_and_label(["x", " \n"], [0, 1]), "row 1 has an empty text", "data.min_words=1"),
        (text_and_label(["x"], [0]), "no row of split 'train' has the label 1", "remove the class"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_in_one_line(
    folder: Path, table: pa.Table, problem: str, fix: str
) -> None:
    write_parquet(table, folder / "train")
    message = refusal(folder)
    assert problem in message
    assert fix in message
    assert "train" in message


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train.parquet", b"", "cannot be read (Parquet file size is 0 bytes)"),
        ("train.parquet", b"PAR1 and then something else", "cannot be read (Parquet magic bytes not found"),
        ("train.csv", b"", "cannot be read (Empty CSV file)"),
        ("train.csv", b"text,label\n", "contains no rows"),
        ("train.csv", b"text,label\nx,0\n12,\n", "row 1 has no label"),
        ("train.csv", b"text,label\n1,0\n2,1\n", "the column 'text' holds int64, not text"),
        ("train.csv", b'text,label\n"a\nb",0\nsecret, secret,1\n', "row 1 has 3 fields instead of 2"),
        ("train.csv", b"text,label\n\xff\xfe,0\nb,1\n", "the column 'text' holds binary, not text"),
        ("train.jsonl", b"", "cannot be read (Empty JSON file)"),
        ("train.jsonl", b'{"text": "a", "lab', "cannot be read (JSON parse error"),
        ("train.jsonl", b'{"text": "a", "text": "b", "label": 0}', "cannot be read (JSON parse error"),
        ("train.json", b'[{"text": "a", "label": 0}, 1]', "cannot be read (a JSON array of something else"),
        ("train.json", b'[{"text": "a secret", "label": 0}, {"text": 1}]', "cannot be read (a column has values"),
        ("train.json", b"[" * 100_000, "cannot be read ("),
        ("train.txt", b"a", "no train.parquet, .csv, .tsv, .jsonl or .json"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    folder: Path, name: str, content: bytes, problem: str
) -> None:
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert problem in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("csv", "a secret text,0\nanother,1\n", "among the 2 columns (their names look like values"),
        ("jsonl", '{"a secret text": 1, "label": 0}\n', "among the 2 columns (their names look like"),
        ("jsonl", '{"text": {"a secret": 1}, "label": 0}\n', "the column 'text' holds struct, not text"),
        ("jsonl", '{"text": [{"a secret": 1}], "label": 0}\n', "holds list<item: struct, not text"),
        (
            "jsonl",
            '{"text": "a", "label": {"secret": 1}}\n',
            "the column 'label' holds struct, not labels",
        ),
        (
            "jsonl",
            '{"text": {"a secret)": 1}}\n{"text": {"a secret)": "x"}}\n',
            "cannot be read (JSON parse error: a column changed from number to string in row 1)",
        ),
    ],
)
def test_records_in_column_names_are_not_quoted(folder: Path, name: str, content: str, problem: str) -> None:
    (folder / f"train.{name}").write_text(content)
    message = refusal(folder)
    assert problem in message
    assert "secret" not in message


@pytest.mark.parametrize("label", [2**53, 2**63, 2**64 - 1, -(2**53), 1e300])
def test_a_label_beyond_exact_integers_is_refused(folder: Path, label: float) -> None:
    kind = pa.float64() if isinstance(label, float) else pa.int64() if label < 2**63 else pa.uint64()
    write_parquet(pa.table({"text": ["x"], "label": pa.array([label], kind)}), folder / "train")
    assert "row 0 has a label that is not an integer" in refusal(folder)


def test_truncated_parquet_is_refused(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train")
    whole = (folder / "train.parquet").read_bytes()
    (folder / "train.parquet").write_bytes(whole[: len(whole) // 2])
    assert "train.parquet: cannot be read" in refusal(folder)


def test_a_string_that_is_not_utf8_is_refused(folder: Path) -> None:
    broken = pa.array([b"\xff", b"a"]).cast(pa.string(), safe=False)
    write_parquet(text_and_label(broken, [0, 1]), folder / "train")
    assert "Invalid UTF8" in refusal(folder)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "cannot be listed (No such file or directory)" in refusal(tmp_path / "nowhere")


def test_a_split_that_exists_twice_is_refused(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train")
    write_csv(table_of(ROWS), folder / "train")
    assert "split 'train' exists more than once: 'train.csv', 'train.parquet'; keep one" in refusal(folder)


def test_a_part_without_rows_is_none(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train-00000-of-00002")
    write_parquet(table_of(ROWS).slice(0, 0), folder / "train-00001-of-00002")
    assert rows_of(load(folder).train) == ROWS


def test_a_missing_part_is_noticed(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train-00000-of-00003.parquet")
    write_parquet(table_of(ROWS), folder / "train-00002-of-00003.parquet")
    assert "part 1 of split 'train' is missing" in refusal(folder)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_every_class_needs_rows_in_every_split(folder: Path, split: str) -> None:
    write_parquet(table_of(ROWS), folder / "train")
    write_parquet(table_of([row for row in ROWS if row[1] == 0]), folder / split)
    assert f"no row of split {split!r} has the label 1; add rows, or remove the class" in refusal(folder)


def test_what_can_be_done_where_a_class_has_no_rows(folder: Path) -> None:
    rows = [*((f"a b {number}", 0) for number in range(20)), ("short", 1)]
    write_parquet(table_of(rows), folder / "train")
    message = refusal(folder, validation_split=None, validation_rows=5, min_words=2)
    assert (
        "split 'train' has the label 1; add rows, or remove the class, or lower data.min_words or data.valid"
        in message
    )
    assert "held out for validation has the label 1; add rows, or remove the class, or raise data.valid" in message


# --- Filters ------------------------------------------------------------------------------------------------


def test_other_labels_are_dropped_from_all_splits_on_request(folder: Path) -> None:
    for split in ("train", "validation", "test"):
        write_parquet(table_of([*ROWS, ("other", 2)]), folder / split)
    splits = load(folder, drop_other_labels=True)
    assert [rows_of(part) for part in (splits.train, splits.validation, splits.test)] == [ROWS] * 3


def test_an_empty_text_of_another_label_is_dropped_with_it(folder: Path) -> None:
    write_parquet(table_of([*ROWS, ("", 2)]), folder / "train")
    assert rows_of(load(folder, drop_other_labels=True).train) == ROWS


def test_min_words_filters_train_and_validation_but_not_test(folder: Path) -> None:
    short = [("two words", 0), ("now three words", 0), ("and\u00a0here four words", 1), ("", 1)]
    write_parquet(table_of(short), folder / "train")
    for split in ("validation", "test"):
        write_parquet(table_of(short[:3]), folder / split)
    splits = load(folder, min_words=3)
    assert rows_of(splits.train) == rows_of(splits.validation) == short[1:3]
    assert rows_of(splits.test) == short[:3]


def test_rows_used_are_the_first_of_each_unit() -> None:
    data = LabelledTexts.of("abcdef", [0, 1] * 3, units=["ann", "bob", "ann", "ann", "bob", "eve"])
    assert data.used(None) is data
    assert data.used(2) == LabelledTexts(
        ("a", "b", "c", "e", "f"), (0, 1, 0, 0, 1), (0, 1, 0, 1, 2), data.unit_names
    )
    assert data.used(9).texts == data.texts


def test_a_units_name_is_the_text_that_a_file_has() -> None:
    units = [1, "1", 1.0, np.float32(1), " ann", "ann ", 1.5]
    data = LabelledTexts.of("abcdefg", [0] * 7, units=units)
    assert data.units == (0, 0, 0, 0, 1, 1, 2)
    assert data.unit_names == ("1", "ann", "1.5")
    for none in (None, float("nan"), pd.NA, pd.NaT, " "):
        with pytest.raises(InputError, match="row 1 has no unit"):
            LabelledTexts.of("ab", [0, 0], units=[("x", 1), none])


def test_min_words_does_not_excuse_empty_texts_elsewhere(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train")
    write_parquet(table_of([*ROWS, ("", 1)]), folder / "test")
    assert "test.parquet: row 40 has an empty text" in refusal(folder, min_words=1)


def test_max_per_class_keeps_random_rows_in_order(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train")
    few = load(folder, max_per_class=5).train
    assert Counter(few.labels) == {0: 5, 1: 5}
    assert rows_of(few) == [row for row in ROWS if row in rows_of(few)]
    assert load(folder, max_per_class=5).train == few
    assert load(folder, max_per_class=5, seed=1).train != few
    assert rows_of(load(folder, max_per_class=1000).train) == ROWS


# --- Holding out validation rows ----------------------------------------------------------------------------


def held_out(folder: Path, rows: list[tuple[str, int]], seed: int = 0) -> Splits:
    write_parquet(table_of(rows), folder / "train")
    return load(folder, validation_split=None, validation_rows=10, seed=seed)


def test_validation_is_held_out_of_train_by_seed(folder: Path) -> None:
    splits = held_out(folder, ROWS)
    assert len(splits.validation) == 10
    assert sorted(rows_of(splits.train) + rows_of(splits.validation)) == sorted(ROWS)
    assert held_out(folder, ROWS) == splits
    assert held_out(folder, ROWS, seed=1).validation != splits.validation


def test_held_out_rows_come_from_the_whole_split(folder: Path) -> None:
    chosen = Counter(text for seed in range(200) for text in held_out(folder, ROWS, seed).validation.texts)
    assert len(chosen) == len(ROWS)
    assert max(chosen.values()) < 90  # 50 expected, with a standard deviation of 6


@pytest.mark.parametrize(
    "new", [(f"a new record {i}", i % 2) for i in range(20)] + [ROWS[3], ("text number 3", 0)]
)
@pytest.mark.parametrize("place", [0, 17, 40])
def test_one_more_record_changes_train_by_exactly_one_record(
    folder: Path, new: tuple[str, int], place: int
) -> None:
    before = Counter(rows_of(held_out(folder, ROWS).train))
    after = Counter(rows_of(held_out(folder, [*ROWS[:place], new, *ROWS[place:]]).train))
    assert not before - after
    assert (after - before).total() == 1


@pytest.mark.parametrize("new", [(f"a new record {i}", i % 2) for i in range(30)])
def test_one_more_record_changes_train_by_exactly_one_record_if_test_is_held_out_too(
    folder: Path, new: tuple[str, int]
) -> None:
    def train_of(rows: list[tuple[str, int]]) -> Counter[tuple[str, int]]:
        write_parquet(table_of(rows), folder / "train")
        settings: dict[str, Any] = {"validation_split": None, "test_split": None}
        splits = load(folder, validation_rows=8, test_rows=9, **settings)
        assert [len(splits.validation), len(splits.test)] == [8, 9]
        return Counter(rows_of(splits.train))

    before, after = train_of(ROWS), train_of([*ROWS, new])
    assert not before - after
    assert (after - before).total() == 1


def test_equal_texts_stay_in_the_same_split(folder: Path) -> None:
    splits = held_out(folder, [*ROWS, *ROWS])
    assert len(set(splits.train.texts) & set(splits.validation.texts)) <= 1


# --- Units of privacy ----------------------------------------------------------------------------------------

PEOPLE = [f"person {i % 13}" for i in range(40)]


def of_people(folder: Path, rows: list[tuple[str, int]], people: list[Any], **settings: Any) -> Splits:
    table = table_of(rows).append_column("person", pa.array(people))
    write_parquet(table, folder / "train")
    settings = {"validation_split": "validation"} | settings
    return load_splits(DataSettings(path=str(folder), **settings), (0, 1), 0, "person")


@pytest.mark.parametrize("people", [PEOPLE, [int(name.split()[1]) + 2**40 for name in PEOPLE]])
def test_rows_of_a_unit_have_its_number(folder: Path, people: list[Any]) -> None:
    train = of_people(folder, ROWS, people).train
    assert train.units == tuple(i % 13 for i in range(40))
    assert train.take([13, 2, 0]).units == (0, 2, 0)
    assert of_people(folder, ROWS, people).validation.units is None


def test_the_digest_depends_on_who_wrote_a_row(folder: Path) -> None:
    digests = [
        of_people(folder, ROWS, people).train.digest for people in (PEOPLE, PEOPLE[1:] + PEOPLE[:1], ["x"] * 40)
    ]
    write_parquet(table_of(ROWS), folder / "train")
    assert len({*digests, load(folder).train.digest}) == 4


def test_empty_texts_go_with_their_units(folder: Path) -> None:
    rows = [("", 0), *ROWS[1:]]
    assert of_people(folder, rows, ["gone", *PEOPLE[1:]], min_words=1).train.units == tuple(
        (i % 13 - 1) % 13 for i in range(1, 40)
    )


@pytest.mark.parametrize("seed", range(20))
def test_one_unit_more_changes_train_by_exactly_one_unit(folder: Path, seed: int) -> None:
    def units_of_train(rows: list[tuple[str, int]], people: list[str]) -> set[frozenset[str]]:
        splits = of_people(folder, rows, people, validation_split=None, validation_rows=4)
        assert not set(splits.train.texts) & set(splits.validation.texts)
        by_unit: dict[int, set[str]] = {}
        for text, unit in zip(splits.train.texts, splits.train.units or (), strict=True):
            by_unit.setdefault(unit, set()).add(text)
        return {frozenset(texts) for texts in by_unit.values()}

    before = units_of_train(ROWS, PEOPLE)
    assert len(before) == 13 - 4
    new = [(f"new {i}", i % 2) for i in range(5)]
    after = units_of_train([*ROWS, *new], [*PEOPLE, *[f"newcomer {seed}"] * 5])
    assert before < after
    assert len(after - before) == 1


@pytest.mark.parametrize(
    ("people", "message"),
    [
        ([*PEOPLE[:-1], None], "row 39 has no unit"),
        ([*PEOPLE[:-2], "", " "], r"row 38 has no unit \(and 1 more rows\)"),
        ([*PEOPLE[:-2], "NA", " nan "], r"row 38 has no unit \(and 1 more rows\)"),
        ([0.5] * 40, "the column 'person' holds double, not names"),
    ],
)
def test_a_row_without_a_unit_is_refused(folder: Path, people: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        of_people(folder, ROWS, people)


def test_units_are_told_apart_by_what_is_not_white_space(folder: Path) -> None:
    spaced = [f" {person}" if i % 2 else f"{person}\t" for i, person in enumerate(PEOPLE)]
    splits = [of_people(folder, ROWS, people) for people in (PEOPLE, spaced)]
    assert splits[0].train.units == splits[1].train.units


@pytest.mark.parametrize("newcomers", [[], ["X7"]])
def test_digits_are_names_as_they_are_written_whatever_other_units_are_called(
    folder: Path, newcomers: list[str]
) -> None:
    """Or 007 would be 7 in a CSV, until somebody is called X7, and other units would be held out."""
    rows = [*ROWS, *(("new", 0) for _ in newcomers)]
    people = [*(f"{int(name.split()[1]):06}" for name in PEOPLE), *newcomers]
    settings = {"validation_split": None, "validation_rows": 4}
    expected = of_people(folder, rows, people, **settings).train
    (folder / "train.parquet").unlink()
    write_csv(table_of(rows).append_column("person", pa.array(people)), folder / "train")
    found = load_splits(DataSettings(path=str(folder), **settings), (0, 1), 0, "person").train
    assert (found.unit_names, found.digest) == (expected.unit_names, expected.digest)


def test_a_persons_rows_in_two_files_are_one_unit(tmp_path: Path) -> None:
    parts = {"a": ["000123", "000124"], "b": ["000123", "X7"]}
    (tmp_path / "train").mkdir()
    for name, people in parts.items():
        frame = pd.DataFrame({"text": [f"{name} {who}" for who in people], "label": [0, 1], "person": people})
        frame.to_csv(tmp_path / "train" / f"{name}.csv", index=False)
    write_parquet(table_of(ROWS), tmp_path / "test")
    write_parquet(table_of(ROWS), tmp_path / "validation")
    settings = DataSettings(path=str(tmp_path), validation_split="validation")
    train = load_splits(settings, (0, 1), 0, "person").train
    assert (train.units, train.unit_names) == ((0, 1, 0, 2), ("000123", "000124", "X7"))


def test_a_missing_unit_column_is_refused(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train")
    settings = DataSettings(path=str(folder), validation_split="validation")
    with pytest.raises(
        InputError, match=r"no column 'person' among the columns 'text', 'label'; set privacy\.unit_column"
    ):
        load_splits(settings, (0, 1), 0, "person")


def test_too_many_units_to_hold_out_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="7 units for validation cannot be held out of the 13 units"):
        of_people(folder, ROWS, PEOPLE, validation_split=None, validation_rows=7)


def test_rows_held_out_for_validation_are_filtered_by_words_only(folder: Path) -> None:
    rows = [("word", i % 2) for i in range(20)] + ROWS
    write_parquet(table_of(rows), folder / "train")
    splits = load(folder, validation_split=None, validation_rows=30, min_words=2, max_per_class=3)
    unfiltered = load(folder, validation_split=None, validation_rows=30)
    assert list(splits.validation.texts) == [text for text in unfiltered.validation.texts if text != "word"]
    assert 6 < len(splits.validation) < 30
    assert "word" not in splits.train.texts
    assert len(splits.train) == 6


def test_at_most_half_of_train_can_be_held_out(folder: Path) -> None:
    write_parquet(table_of(ROWS), folder / "train")
    assert len(load(folder, validation_split=None, validation_rows=20).train) == 20
    message = refusal(folder, validation_split=None, validation_rows=21)
    assert "21 rows for validation cannot be held out of the 40 rows of split 'train'" in message
    assert "hold out at most half (20), or set data.validation_split" in message


def test_a_class_without_held_out_rows_is_refused(folder: Path) -> None:
    write_parquet(table_of([*((text, 0) for text, _ in ROWS), ("b", 1)]), folder / "train")
    message = refusal(folder, validation_split=None, validation_rows=1)
    assert "has the label 1" in message


# --- The hub ------------------------------------------------------------------------------------------------


def test_the_hub_is_asked_for_the_splits_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )

    def load_dataset(*arguments: Any, **settings: Any) -> datasets.Dataset:
        asked.append((*arguments, settings["revision"], settings["split"]))
        columns = {"sentence": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}
        return datasets.Dataset.from_dict(columns, features=features).select([7, 2, 0, 3])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = DataSettings(hub="a/b", hub_config="c", revision="r", validation_split="dev", test_split="held out")
    assert rows_of(load_splits(settings, [0, 1], 0).train) == [ROWS[i] for i in (7, 2, 0, 3)]
    assert asked == [("a/b", "c", "r", split) for split in ("train", "dev", "held out")]


@pytest.mark.parametrize(
    "error", [ConnectionError("no network\nat all"), ValueError("Unknown split"), RuntimeError()]
)
def test_a_hub_failure_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="a/b: cannot be loaded from the hub") as caught:
        load_splits(DataSettings(hub="a/b"), [0, 1], 0)
    assert "data.path" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "()" not in str(caught.value)


# --- Digests ------------------------------------------------------------------------------------------------

ANY_ROWS = st.lists(st.tuples(st.text(max_size=5), st.integers(0, 3)), max_size=5)


def labelled(rows: list[tuple[str, int]]) -> LabelledTexts:
    return LabelledTexts(tuple(text for text, _ in rows), tuple(label for _, label in rows))


@given(one=ANY_ROWS, other=ANY_ROWS)
def test_digests_are_equal_exactly_where_the_rows_are(
    one: list[tuple[str, int]], other: list[tuple[str, int]]
) -> None:
    assert (labelled(one).digest == labelled(other).digest) == (one == other)


@given(ANY_ROWS)
def test_a_digest_covers_counts_labels_lengths_and_texts(rows: list[tuple[str, int]]) -> None:
    """The digest identifies the target: a new digest of the same rows would cause a new release."""
    texts = [text.encode() for text, _ in rows]
    numbers = [len(rows), *(label for _, label in rows), *map(len, texts)]
    content = b"".join(number.to_bytes(8, "little") for number in numbers) + b"".join(texts)
    assert labelled(rows).digest == hashlib.sha256(content).hexdigest()


@given(rows=ANY_ROWS, data=st.data())
def test_a_digest_changes_with_the_order(rows: list[tuple[str, int]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(rows))
    assume(shuffled != rows)
    assert labelled(shuffled).digest != labelled(rows).digest


@given(texts=st.lists(st.text(max_size=3), min_size=2, max_size=4), cut=st.integers(0, 3))
def test_a_digest_depends_on_text_boundaries(texts: list[str], cut: int) -> None:
    moved = [texts[0] + texts[1][:cut], texts[1][cut:], *texts[2:]]
    assume(moved != texts)
    labels = (0,) * len(texts)
    assert LabelledTexts(tuple(moved), labels).digest != LabelledTexts(tuple(texts), labels).digest


def test_rows_of_a_class() -> None:
    part = LabelledTexts(("a", "b", "c"), (1, 0, 1))
    assert [part.of_class(label).tolist() for label in (1, 0, 2)] == [[0, 2], [1], []]
    assert len(part) == 3


# --- Real data ----------------------------------------------------------------------------------------------


@pytest.mark.material
@pytest.mark.parametrize(
    ("name", "settings", "labels", "sizes"),
    [
        ("sst2", {"validation_split": None, "test_split": "validation"}, (0, 1), (66_349, 1_000, 872)),
        ("rotten_tomatoes", {}, (0, 1), (8_530, 1_066, 1_066)),
        (
            "tweet_emotions",
            {"validation_split": None, "test_split": "validation"},
            (0, 1, 2, 3, 4, 5),
            (15_000, 1_000, 2_000),
        ),
        (
            "tweet_emotions",
            {"validation_split": None, "test_split": "validation", "drop_other_labels": True},
            (0, 1),
            (9_028, 1_000, 1_254),
        ),
        ("imdb", {"validation_split": None}, (0, 1), (4_000, 1_000, 2_000)),
    ],
)
def test_real_data_loads(
    material: Path, name: str, settings: dict[str, Any], labels: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    splits = load(material / "data" / name, labels=labels, **settings)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == sizes
    assert set(splits.train.labels) == set(labels)
    assert all(text == text.strip() for text in splits.train.texts)


def test_a_damaged_column_name_is_reported_in_one_line(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pd.DataFrame({"text": ["a", "b"] * 9, "label": [0, 1] * 9}).to_parquet(tmp_path / f"{split}.parquet")
    whole = (tmp_path / "train.parquet").read_bytes()
    (tmp_path / "train.parquet").write_bytes(whole.replace(b"text", b"\x80ext"))
    with pytest.raises(InputError, match=r"train\.parquet: cannot be read"):
        load_splits(DataSettings(path=str(tmp_path), validation_rows=2), (0, 1), 0)
