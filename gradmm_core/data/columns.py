"""From the columns of a table to usable rows: stripped texts, and labels of classes.

All problems of a table are reported together. Messages name columns and row numbers, never values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from gradmm.config.settings import DataSettings
from gradmm.errors import InputError, together


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a split: texts (object array), labels (int64), and names of units if there are any."""

    texts: np.ndarray
    labels: np.ndarray
    units: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, which: np.ndarray) -> Rows:
        """Select rows by a mask or by row numbers."""
        return Rows(self.texts[which], self.labels[which], None if self.units is None else self.units[which])


def usable_rows(
    table: pa.Table,
    where: str,
    settings: DataSettings,
    labels: Sequence[int],
    drops_empty: bool,
    unit_column: str | None,
) -> Rows:
    """Read the rows of one file that have a label among `labels`.

    Args:
        where: the file's name for error messages.
        drops_empty: drop rows with an empty text instead of refusing them.

    Raises:
        InputError: for columns that are missing or of another type, rows without text or label, and labels of no
            class.
    """
    if table.num_rows == 0:
        raise InputError("contains no rows", where, "add rows, or choose another split")
    texts, (own_labels, known), units = together(
        # A row of another label may be empty if it is dropped, so labels decide on empty texts then.
        lambda: _texts(table, settings, where, may_be_empty=drops_empty or settings.drop_other_labels),
        lambda: _known_labels(table, settings, labels, where),
        lambda: None if unit_column is None else _units(table, unit_column, where),
    )
    empty = known & (texts == "")
    if not drops_empty:
        _refuse_empty(empty, where)
    return Rows(texts, own_labels, units)[known & ~empty]


def _known_labels(
    table: pa.Table, settings: DataSettings, labels: Sequence[int], where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read labels; return them and a mask of those of a class."""
    own = _labels(table, settings, where)
    known = np.isin(own, labels)
    if not known.all() and not settings.drop_other_labels:
        what = f"has the label {own[known.argmin()]}, which belongs to no class"
        raise InputError(_of_rows(~known, what), where, "add a class, or set data.drop_other_labels=true")
    return own, known


def _refuse_empty(empty: np.ndarray, where: str) -> None:
    if empty.any():
        fix = "remove it (for train, data.min_words=1 does this)"
        raise InputError(_of_rows(empty, "has an empty text"), where, fix)


def _refuse_gaps(column: pa.ChunkedArray, what: str, where: str, fix: str) -> None:
    if column.null_count:
        raise InputError(_of_rows(column.is_null().to_numpy(), what), where, fix)


def check_type(
    column: pa.ChunkedArray, name: str, types: Sequence[Callable[[pa.DataType], bool]], where: str, fix: str
) -> None:
    """Raise an InputError if a column has none of the types, which are those of integers or text."""
    if not any(is_type(column.type) for is_type in types):
        what = f"the column {name!r} holds {kind_of(column.type)}, neither integers nor text"
        raise InputError(what, where, fix)


def check_text(column: pa.ChunkedArray, name: str, where: str, fix: str) -> None:
    """Raise an InputError if a column does not hold text."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        # pyarrow reads bytes that are not UTF-8 as binary.
        encoding = "save the file as UTF-8, or " if pa.types.is_binary(column.type) else ""
        what = f"the column {name!r} holds {kind_of(column.type)}, not text"
        raise InputError(what, where, f"{encoding}{fix}")


def _of_rows(rows: np.ndarray, what: str) -> str:
    """Say what the first of some rows has, and how many more there are.

    Args:
        rows: a mask with at least one row.
    """
    more = int(rows.sum()) - 1
    return f"row {rows.argmax()} {what}" + (f" (and {more:,} more rows)" if more else "")


def _default_text_column(names: Sequence[str], where: str) -> str:
    candidates = {"text", "sentence"}.intersection(names)
    if len(candidates) != 1:
        raise InputError(
            f"{'both' if candidates else 'neither'} of 'text' and 'sentence' found among {listed_columns(names)}",
            where,
            "set data.text_column",
        )
    return candidates.pop()


def _texts(table: pa.Table, settings: DataSettings, where: str, may_be_empty: bool) -> np.ndarray:
    """Read texts, without whitespace around them."""
    name = settings.text_column or _default_text_column(table.column_names, where)
    column = column_of(table, name, "data.text_column", where)
    check_text(column, name, where, "set data.text_column")
    _refuse_gaps(column, "has no text", where, "remove the row")
    texts = column.to_pandas().str.strip().to_numpy(dtype=object)
    if not may_be_empty:
        _refuse_empty(texts == "", where)
    return texts


def _labels(table: pa.Table, settings: DataSettings, where: str) -> np.ndarray:
    """Convert a column to labels: the places of its values in `data.label_names`, or else its integers."""
    name = settings.label_column
    column = column_of(table, name, "data.label_column", where)
    check_type(column, name, _LABEL_TYPES, where, "set data.label_column")
    _refuse_gaps(column, "has no label", where, "remove the row, or give it a label")
    names = settings.label_names
    return _integers(column, where) if names is None else _places(column, names, where)


def _integers(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """Convert labels to integers, also from text or from floats (as pandas writes columns with gaps)."""
    numbers = np.asarray(pd.to_numeric(column.to_pandas(), errors="coerce"), dtype=float)
    whole = (np.abs(numbers) < 2**53) & (numbers == np.floor(numbers))  # larger floats are not exact integers
    if not whole.all():
        what = _of_rows(~whole, "has a label that is not an integer")
        raise InputError(what, where, "set data.label_names to the column's values, in the order of the labels")
    return numbers.astype(np.int64)


def _places(column: pa.ChunkedArray, names: Sequence[str], where: str) -> np.ndarray:
    """Return the place of each label's name in `names`."""
    values = label_values(column)
    places = pd.Index(names).get_indexer(pd.Index(values))
    if (places < 0).any():
        what = _of_rows(places < 0, "has a label that is not among data.label_names")
        raise InputError(what, where, "add it there, or remove the row")
    return places.astype(np.int64)


def label_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column's values as the text that `data.label_names` lists: whole numbers without a point."""
    if pa.types.is_boolean(column.type):
        return np.where(column.to_numpy(), "true", "false").astype(object)
    if pa.types.is_floating(column.type):
        values = column.to_pylist()
        return np.array([f"{value:.0f}" if value.is_integer() else str(value) for value in values], object)
    return column.cast(pa.string()).to_pandas().str.strip().to_numpy(dtype=object)


def _units(table: pa.Table, name: str, where: str) -> np.ndarray:
    """Read the names of units, integers or text, as text."""
    column = column_of(table, name, "privacy.unit_column", where)
    check_type(column, name, _UNIT_TYPES, where, "set privacy.unit_column")
    _refuse_gaps(column, "has no unit", where, f"fill the column {name!r}, or remove the row")
    return column.cast(pa.string()).to_pandas().to_numpy(dtype=object)


_UNIT_TYPES = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)

#: Types of values that `label_values` converts to text.
VALUE_TYPES = (
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
)

#: A column without any label has the type null.
_LABEL_TYPES = (*VALUE_TYPES, pa.types.is_null)


def column_of(table: pa.Table, name: str, setting: str, where: str) -> pa.ChunkedArray:
    count = table.column_names.count(name)
    if count == 0:
        problem = f"no column {name!r} among {listed_columns(table.column_names)}"
        raise InputError(problem, where, f"set {setting}")
    if count > 1:
        raise InputError(f"{count} columns are called {name!r}", where, "rename all but one")
    column = table[name]
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def listed_columns(names: Sequence[str]) -> str:
    """List the columns for an error, unless they may be values: the first record of a file without header."""
    if all(name.isidentifier() and len(name) <= _MAX_NAME_LENGTH for name in names):
        return f"the columns {', '.join(map(repr, names))}"
    return f"the {len(names)} columns (their names look like values; is the header missing?)"


_MAX_NAME_LENGTH = 40


def kind_of(kind: pa.DataType) -> str:
    """Describe a type without field names, which may come from a record."""
    return re.sub(r"\bstruct<.*>", "struct", str(kind), flags=re.DOTALL)
