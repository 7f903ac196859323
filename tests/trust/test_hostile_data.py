"""Data from anywhere: whatever the files hold, splits or one line that quotes no row; and no code is ever read."""

from __future__ import annotations

import io
import json
import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradmm.config.settings import DataSettings
from gradmm.data.splits import Splits, load_splits
from tests.conftest import examples
from tests.trust.told import told

pytestmark = pytest.mark.timeout(200)  # none may hang

#: In every text, and never to be seen in a message.
SECRET = "zq xwvj"


def cases(count: int) -> settings:
    """Hypothesis settings for many short examples."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return examples(count, derandomize=True, suppress_health_check=checks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def load(folder: Path, **changes: Any) -> Any:
    """The splits, all from one file so that a case costs little; or what was said."""
    splits = dict.fromkeys(["train_split", "validation_split", "test_split"], "train")
    chosen: dict[str, Any] = splits | {"path": str(folder)} | changes
    found = told(lambda: load_splits(DataSettings(**chosen), (0, 1), 0), SECRET)
    if isinstance(found, Splits):
        assert set(found.test.labels) == {0, 1}
        assert all(text == text.strip() and text for text in found.test.texts)
        assert len(found.train.digest) == 64
    return found


def write(folder: Path, name: str, content: bytes) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / name).write_bytes(content)


def parquet_bytes(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


any_text = st.text(st.characters(codec="utf-8"), max_size=12)
texts = any_text.map(lambda text: f"{SECRET}{text}")
labels = st.one_of(st.sampled_from([0, 1]), st.integers(), st.floats(), texts, st.none(), st.booleans())

SAFE_TYPES: list[tuple[pa.DataType, Callable[[list], list]]] = [
    (pa.string(), lambda rows: [f"{SECRET} {row}" for row in rows]),
    (pa.large_string(), lambda rows: [f"{SECRET} {row}" for row in rows]),
    (pa.dictionary(pa.int32(), pa.string()), lambda rows: [f"{SECRET}{row % 2}" for row in rows]),
    (pa.binary(), lambda rows: [SECRET.encode() + bytes([255, row % 256]) for row in rows]),
    (pa.int64(), lambda rows: [row % 2 for row in rows]),
    (pa.uint64(), lambda rows: [2**64 - 1 - row for row in rows]),
    (pa.float64(), lambda rows: [row / 2 for row in rows]),
    (pa.bool_(), lambda rows: [bool(row % 2) for row in rows]),
    (pa.timestamp("us"), lambda rows: rows),
    (pa.decimal128(20, 2), lambda rows: rows),
    (pa.null(), lambda rows: [None] * len(rows)),
    (pa.list_(pa.string()), lambda rows: [[SECRET]] * len(rows)),
    (pa.struct({SECRET: pa.string()}), lambda rows: [{SECRET: SECRET}] * len(rows)),
    (pa.map_(pa.string(), pa.int64()), lambda rows: [[(SECRET, 1)]] * len(rows)),
    (pa.list_(pa.struct({SECRET: pa.int64()})), lambda rows: [[{SECRET: 1}]] * len(rows)),
    (pa.dictionary(pa.int8(), pa.int64()), lambda rows: [row % 2 for row in rows]),
]
column_names = st.one_of(st.sampled_from(["text", "sentence", "label", "label", "text"]), texts)
columns = st.tuples(column_names, st.sampled_from(SAFE_TYPES))


@cases(1500)
@given(st.lists(columns, min_size=1, max_size=4), st.integers(0, 6), st.booleans())
@example([("text", SAFE_TYPES[0]), ("label", SAFE_TYPES[5])], 3, False)
def test_any_table_is_read_or_refused_in_a_line(folder: Path, columns: list, rows: int, gap: bool) -> None:
    """Wrong types, nested columns, duplicate ones, gaps."""
    arrays = []
    for _, (kind, values_of) in columns:
        values = values_of(list(range(rows)))
        arrays.append(pa.array([*values[:-1], None] if gap and values else values, kind))
    write(folder, "train.parquet", parquet_bytes(pa.table(arrays, names=[name for name, _ in columns])))
    load(folder)


@cases(1200)
@given(st.lists(st.tuples(texts, st.sampled_from([0, 1])), min_size=3, max_size=6), st.data())
def test_any_texts_are_read_as_they_are(folder: Path, rows: list[tuple[str, int]], data: st.DataObject) -> None:
    """Every plane of Unicode, zero-width and control characters, what spreadsheets take for a formula."""
    rows = [(f"{data.draw(st.sampled_from(['', '=', '+', '-', '@']))}{text}", label) for text, label in rows]
    table = pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
    write(folder, "train.parquet", parquet_bytes(table))
    found = load(folder)
    if isinstance(found, Splits):
        assert list(found.test.texts) == [text.strip() for text, _ in rows]


csv_syntax = st.sampled_from(["text,label\n", "\n", ",", '"', "\r", '""', "0", "1", "\ufeff", "\0"])


@cases(1500)
@given(st.lists(st.one_of(csv_syntax, texts), max_size=12), st.booleans())
@example([f"{SECRET} words", ",", "0", "\n", f"{SECRET} more", ",", "1", "\n"], False)
def test_any_csv_is_read_or_refused_in_a_line(folder: Path, pieces: list[str], headed: bool) -> None:
    write(folder, "train.csv", ("text,label\n" * headed + "".join(pieces)).encode())
    load(folder)


json_values = st.recursive(
    st.one_of(labels, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.one_of(texts, st.just("text")), inner, max_size=2)
    ),
    max_leaves=4,
)


@cases(1200)
@given(st.lists(st.fixed_dictionaries({"text": st.one_of(texts, json_values), "label": json_values}), max_size=4))
@example([{"text": {SECRET: 1}, "label": 0}, {"text": {SECRET: "x"}, "label": 1}])
@example([{"text": SECRET, "label": 10**30}])
@example([{"text": "a", "label": None}, {"text": "b", "label": {f"{SECRET}\n": [0, SECRET]}}])
def test_any_json_lines_are_read_or_refused_in_a_line(folder: Path, rows: list[dict]) -> None:
    write(folder, "train.jsonl", "\n".join(map(json.dumps, rows)).encode())
    load(folder)


json_syntax = st.sampled_from(['{"text": "', '", "label": ', *'01}\n"{[],:', "\\ud800", "nul", SECRET])


@cases(800)
@given(st.lists(json_syntax, max_size=14))
def test_any_broken_json_is_refused_in_a_line(folder: Path, pieces: list[str]) -> None:
    write(folder, "train.json", "".join(pieces).encode())
    load(folder)


@pytest.fixture(scope="module")
def whole() -> bytes:
    rows = [f"{SECRET} {row}" for row in range(8)]
    return parquet_bytes(pa.table({"text": rows, "label": [row % 2 for row in range(8)]}))


@cases(1200)
@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=4), st.floats(0, 1), st.booleans())
def test_any_damaged_parquet_is_read_or_refused_in_a_line(
    folder: Path, whole: bytes, flips: list[tuple[float, int]], kept: float, cut: bool
) -> None:
    content = bytearray(whole)
    for place, value in flips:
        content[int(place * len(content))] = value
    write(folder, "train.parquet", bytes(content[: int(kept * len(content))] if cut else content))
    load(folder)


@cases(200)
@given(st.text(string.ascii_letters + "./~-*[]\\ \n\u202e\x1b", max_size=12), st.sampled_from(["path", "split"]))
@example("../../../etc", "split")
@example("/dev", "path")
@example("x" * 300, "path")
@example("x" * 300, "split")
def test_any_place_is_read_or_refused_in_a_line(folder: Path, name: str, what: str) -> None:
    write(folder, "other.parquet", b"")
    assert isinstance(load(folder, **({"path": name} if what == "path" else {"train_split": name})), str)


def test_loops_of_links_and_pipes_are_no_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").symlink_to(tmp_path / "train.csv")
    os.mkfifo(tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").symlink_to("/dev/zero")
    assert "no train.parquet, .csv" in load(tmp_path)


def test_texts_of_a_megabyte_are_read(folder: Path) -> None:
    long = f"{SECRET} " * 150_000
    frame = pd.DataFrame({"text": [long, f"{long}1", "a", "b"], "label": [0, 1, 0, 1]})
    for name, content in {
        "train.csv": frame.to_csv(index=False).encode(),
        "train.jsonl": frame.to_json(orient="records", lines=True).encode(),
        "train.parquet": parquet_bytes(pa.Table.from_pandas(frame)),
    }.items():
        write(folder, name, content)
        assert len(load(folder).test.texts[1]) > 10**6


def test_a_hundred_thousand_rows_and_columns_are_a_matter_of_seconds(folder: Path) -> None:
    rows = 100_000
    table = pa.table({"text": [f"{SECRET} {row}" for row in range(rows)], "label": np.arange(rows) % 2})
    write(folder, "train.parquet", parquet_bytes(table))
    assert len(load(folder).test) == rows
    columns = range(rows // 10)
    write(folder, "train.csv", "\n".join(",".join(f"{cell}{i}" for i in columns) for cell in "cd").encode())
    assert "neither of 'text' and 'sentence' found among the columns 'c0'" in load(folder)
