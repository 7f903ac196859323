"""The shape of a data set: its splits, columns and label values, and rounded sizes. Quotes no text.

A new recipe is written from it. This has no privacy guarantee: what a recipe says of the data is as public as the
release made with it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gradmm.config.settings import DataSettings
from gradmm.data.columns import (
    LABELS,
    MAX_NAME_LENGTH,
    VALUE_TYPES,
    check_text,
    check_type,
    column_of,
    label_values,
    listed_columns,
)
from gradmm.data.sources import has_split, is_one_split, sources_of
from gradmm.errors import InputError

#: Maximum number of values of a label column; a column with more probably holds something else.
MAX_CLASSES = 50

#: Names that columns of texts and of labels often have, likeliest first.
TEXT_NAMES = ("text", "sentence", "review", "content", "message", "body", "comment", "tweet", "document")
LABEL_NAMES = (
    "label",
    "labels",
    "class",
    "category",
    "sentiment",
    "stars",
    "rating",
    "target",
    "emotion",
    "topic",
)

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}

#: Texts are taken for English if fewer than this share of them have a letter outside ASCII.
FOREIGN_SHARE = 0.1

#: Lengths of texts in words to which the typical length is rounded up.
LENGTHS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class DataShape:
    """Facts about a data set that go into its recipe.

    Attributes:
        splits: name of the train, validation and test split; None where there is none.
        unlabelled: names of validation and test splits that are left out, because they have none of the labels.
        label_names: values of the label column, if these are not integers from 0 on.
        class_names: a name for each label.
        rows: of train, rounded to two digits.
        words: of a typical text, rounded up to one of `LENGTHS`.
        language: `any` if many texts have letters outside ASCII, else `english`.
    """

    path: str
    splits: dict[str, str | None]
    unlabelled: tuple[str, ...]
    text_column: str
    label_column: str
    label_names: tuple[str, ...] | None
    class_names: dict[int, str]
    rows: int
    words: int
    language: str


def shape_of(path: str, text_column: str | None, label_column: str | None) -> DataShape:
    """Read a data set's shape from its train split.

    Args:
        text_column: default: the column with a usual name, or the only column of text.
        label_column: default: the column with a usual name, or the only other column with few values.

    Raises:
        InputError: for data that cannot be read, and for columns that cannot be found or are not told apart.
    """
    splits = _splits(Path(os.path.expanduser(path)))
    settings = DataSettings(path=path, train_split=splits["train"] or "train")
    tables = [part for source in sources_of(settings, settings.train_split) for part in source.parts()]
    if not tables:
        raise InputError("contains no rows", path, "add rows")
    table = _as_one(tables, path)
    if table.num_columns < 2:
        fix = "give texts and labels in columns of their own; commas, semicolons or tabs separate those of a .csv"
        raise InputError("has one column", path, fix)
    text = _column(table, TEXT_NAMES, _is_text, "text", path) if text_column is None else text_column
    label = _column(table, LABEL_NAMES, _is_label, "label", path, text) if label_column is None else label_column
    texts = column_of(table, text, "the text column", path)
    check_text(texts, text, path, "name another text column")
    names, classes = _classes(table, label, path)
    known = set(names or map(str, classes))
    if (label_column is None and label in known) or (text_column is None and len(text) > MAX_NAME_LENGTH):
        # A recipe with a record's values for names would be released with them.
        fix = "add a line with the columns' names, or name both columns"
        raise InputError("its first line seems to have values instead of columns' names", path, fix)
    unlabelled = {
        part: split
        for part, split in splits.items()
        if part != "train" and split is not None and not _has_labels(path, split, label, known)
    }
    words = pc.count_substring_regex(texts.drop_null(), r"\S+")  # pyright: ignore
    typical = pc.approximate_median(words).as_py() or 0  # pyright: ignore
    return DataShape(
        path=path,
        splits=splits | dict.fromkeys(unlabelled, None),
        unlabelled=tuple(unlabelled.values()),
        text_column=text,
        label_column=label,
        label_names=names,
        class_names=classes,
        rows=two_digits(table.num_rows),
        words=next((n for n in LENGTHS if n >= typical), LENGTHS[-1]),
        language=_language(texts),
    )


def _language(texts: pa.ChunkedArray) -> str:
    """Tell by the letters whether texts may be English. Others with letters of ASCII alone do no harm."""
    beyond_ascii = pc.replace_substring_regex(texts.drop_null(), "[A-Za-z]+", "")  # pyright: ignore
    share = pc.mean(pc.match_substring_regex(beyond_ascii, r"\p{L}")).as_py()  # pyright: ignore
    return "english" if (share or 0.0) < FOREIGN_SHARE else "any"


def _has_labels(path: str, split: str, name: str, known: set[str]) -> bool:
    """Return whether a row of a split has a known label. Those of test splits are often withheld."""
    parts = (part for source in sources_of(DataSettings(path=path), split) for part in source.parts())
    columns = (column_of(part, name, "the label column", path) for part in parts if name in part.column_names)
    return any(
        known & set(label_values(column.drop_null()))
        for column in columns
        if any(is_such(column.type) for is_such in VALUE_TYPES)
    )


def _as_one(parts: Sequence[pa.Table], where: str) -> pa.Table:
    """Join the parts of a split.

    Raises:
        InputError: for files whose columns have different types.
    """
    if all(part.schema.equals(parts[0].schema) for part in parts):  # as all parts of one file are
        return pa.concat_tables(parts)
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException as error:
        what = "holds files with columns of one name and different types, or with two columns of one name"
        raise InputError(what, where, "give all files of the split the same columns") from error


def _splits(path: Path) -> dict[str, str | None]:
    if is_one_split(path):
        return {"train": "train", "validation": None, "test": None}
    splits = {
        part: next((name for name in names if has_split(path, name)), None) for part, names in SPLIT_NAMES.items()
    }
    if splits["train"] is None:
        what = "is neither a data file nor a folder with a file for the split train"
        raise InputError(what, str(path), "give a .csv, .jsonl or .parquet file, or a folder of them")
    return splits


def _column(
    table: pa.Table,
    usual: Sequence[str],
    fits: Callable[[pa.ChunkedArray], bool],
    option: str,
    where: str,
    taken: str | None = None,
) -> str:
    """Return the column with a usual name, or else the only one that fits; not the one that is taken."""
    names = [name for name in table.column_names if name != taken]
    by_name = {name.lower(): name for name in reversed(names)}
    for name in usual:
        if name in by_name:
            return by_name[name]
    candidates = [name for name in names if names.count(name) == 1 and fits(table[name])]
    if len(candidates) != 1:
        among = listed_columns(candidates or names, table.column_names)
        may_be = "may be any" if candidates else "seems to be none"
        what = f"the {option} column cannot be told: it {may_be} of {among}"
        raise InputError(what, where, f"name the {option} column")
    return candidates[0]


def _is_text(column: pa.ChunkedArray) -> bool:
    """Return whether most values differ and have several words."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return False
    values = column.drop_null()
    several = pc.sum(pc.match_substring_regex(values, r"\S\s+\S")).as_py() or 0  # pyright: ignore
    return 2 * several > len(values) and 2 * pc.count_distinct(values).as_py() > len(values)  # pyright: ignore


def _is_label(column: pa.ChunkedArray) -> bool:
    """Return whether a column has few values, each several times."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_nested(kind) or pa.types.is_temporal(kind) or pa.types.is_binary(kind):
        return False
    distinct = len(column.unique().drop_null())
    return 2 <= distinct <= MAX_CLASSES and 2 * distinct <= len(column)


def _classes(table: pa.Table, name: str, where: str) -> tuple[tuple[str, ...] | None, dict[int, str]]:
    """Return the label column's values, unless they are labels already, and a name for each label."""
    column, fix = column_of(table, name, "the label column", where), "name another label column"
    check_type(column, name, VALUE_TYPES, LABELS, where, fix)
    given = pc.invert(column.is_null(nan_is_null=True))  # pyright: ignore
    values = [value for value in np.unique(label_values(column.filter(given))) if value]
    if not 2 <= len(values) <= MAX_CLASSES:
        what = f"the column {name!r} has {len(values):,} values; a label column has 2 to {MAX_CLASSES}"
        raise InputError(what, where, fix)
    if pa.types.is_integer(column.type) and all(value.isdecimal() for value in values):
        labels, declared = sorted(map(int, values)), _declared_names(table, name)
        return None, {label: declared[label] if label < len(declared) else str(label) for label in labels}
    return tuple(values), dict(enumerate(values))


def _declared_names(table: pa.Table, column: str) -> list[str]:
    """Return the class names that `datasets` writes into a file's schema; empty if there are none."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def two_digits(count: int) -> int:
    """Round to two significant digits."""
    unit = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return round(count / unit) * unit
