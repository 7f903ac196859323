"""From the columns of a table to usable rows: stripped texts, and labels of classes.

All problems of a table are reported together. Messages name columns and row numbers, never values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from gradmm.config.settings import DataSettings
from gradmm.errors import InputError, InputErrors, together

#: Spellings of no value, by Arrow, pandas and R, which name no unit.
NO_NAMES = ("", "NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "NaT", "NULL", "Null", "null", "None", "none")


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a split: texts (object array), labels (int64), and names of units if there are any."""

    texts: np.ndarray
    labels: np.ndarray
    units: np.ndarray | None = None

    def __getitem__(self, mask: np.ndarray) -> Rows:
        return Rows(self.texts[mask], self.labels[mask], None if self.units is None else self.units[mask])


class RowProblems:
    """The problems of one file's rows. Each kind is told once: the first row with it, and how many more there are.

    Args:
        where: the file's name.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._found: dict[str, tuple[int, str, int]] = {}
        self._rows_before = 0

    def add(self, rows: np.ndarray, what: str, fix: str) -> None:
        """Note that the rows in the mask have a problem; `fix` tells kinds apart."""
        if rows.any():
            first, _, count = self._found.get(fix, (self._rows_before + int(rows.argmax()), what, 0))
            self._found[fix] = first, what, count + int(rows.sum())

    def go_on(self, rows: int) -> None:
        """Count the rows of a part of the file, after which the next part begins."""
        self._rows_before += rows

    def refuse(self) -> None:
        """Raise an InputError if the file has rows with problems."""
        problems = [
            InputError(
                f"row {first} {what}" + (f" (and {count - 1:,} more rows)" if count > 1 else ""), self.where, fix
            )
            for fix, (first, what, count) in self._found.items()
        ]
        if problems:
            raise InputErrors(problems) if len(problems) > 1 else problems[0]

    def __bool__(self) -> bool:
        return bool(self._found)


def usable_rows(
    tables: Iterable[pa.Table],
    where: str,
    settings: DataSettings,
    labels: Sequence[int],
    drops_empty: bool,
    unit_column: str | None,
) -> Iterator[Rows]:
    """Read the rows of one file, part by part, that have a label among `labels`.

    Args:
        tables: the parts of the file.
        where: the file's name for error messages.
        drops_empty: drop rows with an empty text instead of refusing them.

    Raises:
        InputError: for columns that are missing or of another type, before any row; for rows without text or label
            and labels of no class, after the last one.
    """
    problems = RowProblems(where)
    for table in tables:
        texts, own_labels, units = together(
            lambda table=table: _text_column(table, settings, where),
            lambda table=table: _label_column(table, settings, where),
            lambda table=table: None if unit_column is None else _unit_column(table, unit_column, where),
        )
        usable = _usable(texts, own_labels, units, problems, settings, labels, drops_empty)
        problems.go_on(table.num_rows)
        if not problems:
            yield usable
    problems.refuse()


def _usable(
    text_column: pa.ChunkedArray,
    label_column: pa.ChunkedArray,
    unit_column: pa.ChunkedArray | None,
    problems: RowProblems,
    settings: DataSettings,
    labels: Sequence[int],
    drops_empty: bool,
) -> Rows:
    """Return the usable rows of one part of a file; note the others' problems."""
    own, known, label_problems = _known_labels(label_column, settings, labels)
    problems.add(_gaps(text_column), "has no text", "remove the row")
    texts = text_column.to_pandas().str.strip().to_numpy(dtype=object)
    empty = texts == ""
    if not drops_empty:
        # A row of another label may be empty: it is dropped.
        problems.add(
            empty & known if settings.drop_other_labels else empty,
            "has an empty text",
            "remove it (for train, data.min_words=1 does this)",
        )
    for problem in label_problems:
        problems.add(*problem)
    units = None
    if unit_column is not None:
        units = unit_column.cast(pa.string()).to_pandas().str.strip().to_numpy(dtype=object)
        # Neither an empty field of a CSV nor a spelling of none is a null in a column of text.
        missing = _gaps(unit_column) | np.isin(units.astype(str), NO_NAMES)
        fix = "fill the column that privacy.unit_column names, or remove the row"
        problems.add(missing, "has no unit", fix)
    return Rows(texts, own, units)[known & ~empty]


def _known_labels(
    column: pa.ChunkedArray, settings: DataSettings, labels: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, str, str]]]:
    """Convert a column to labels: the places of its values in `data.label_names`, or else its integers.

    Returns the labels, a mask of those of a class, and the others' problems, as `RowProblems.add` takes them.
    """
    gaps, names = _gaps(column), settings.label_names
    if names is None:
        own, valid = _integers(column)
        what = "has a label that is not an integer"
        fix = "set data.label_names to the column's values, in the order of the labels"
        invalid = ~valid & ~gaps
    else:
        values = label_values(column)
        own = _places(values, names, column.type)
        valid = own >= 0
        what = "has a label that is not among data.label_names"
        fix = "add it there, or set data.drop_other_labels=true"
        gaps |= (values == "") & ~valid  # an empty field of a CSV
        invalid = np.zeros_like(valid) if settings.drop_other_labels else ~valid & ~gaps
    known = np.isin(own, labels) & valid
    unknown = np.zeros_like(known) if settings.drop_other_labels else valid & ~known
    return (
        own,
        known,
        [
            (gaps, "has no label", "remove the row, or give it a label"),
            (invalid, what, fix),
            (unknown, "has a label that belongs to no class", "add a class, or set data.drop_other_labels=true"),
        ],
    )


def _places(values: np.ndarray, names: Sequence[str], kind: pa.DataType) -> np.ndarray:
    """Return the place of each value in `data.label_names`; -1 for others.

    The names are read as pyarrow reads the column: as numbers (01 is 1), or in lower case (True is true).
    """
    own = pd.Index([_as_value(name, kind) for name in names])
    return (own if own.is_unique else pd.Index(names)).get_indexer(pd.Index(values)).astype(np.int64)


def _as_value(name: str, kind: pa.DataType) -> str:
    """Write a name as `label_values` writes a value of this type."""
    name = name.strip()
    if pa.types.is_boolean(kind):
        return name.lower()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        try:
            return _number(float(name))
        except ValueError:
            return name
    return name


def _gaps(column: pa.ChunkedArray) -> np.ndarray:
    """Return a mask of the rows without a value. Not a number (NaN) is none."""
    return column.is_null(nan_is_null=True).to_numpy()


def check_type(
    column: pa.ChunkedArray,
    name: str,
    types: Sequence[Callable[[pa.DataType], bool]],
    known_as: str,
    where: str,
    fix: str,
) -> None:
    """Raise an InputError if a column has none of the types.

    Args:
        known_as: what columns of these types hold.
    """
    if not any(is_type(column.type) for is_type in types):
        raise InputError(f"the column {name!r} holds {kind_of(column.type)}, not {known_as}", where, fix)


def check_text(column: pa.ChunkedArray, name: str, where: str, fix: str) -> None:
    """Raise an InputError if a column does not hold text."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        # pyarrow reads bytes that are not UTF-8 as binary.
        encoding = "save the file as UTF-8, or " if pa.types.is_binary(column.type) else ""
        what = f"the column {name!r} holds {kind_of(column.type)}, not text"
        raise InputError(what, where, f"{encoding}{fix}")


def _default_text_column(names: Sequence[str], where: str) -> str:
    candidates = {"text", "sentence"}.intersection(names)
    if len(candidates) != 1:
        raise InputError(
            f"{'both' if candidates else 'neither'} of 'text' and 'sentence' found among {listed_columns(names)}",
            where,
            "set data.text_column",
        )
    return candidates.pop()


def _text_column(table: pa.Table, settings: DataSettings, where: str) -> pa.ChunkedArray:
    name = settings.text_column
    if name is None:
        name = _default_text_column(table.column_names, where)
    column = column_of(table, name, "data.text_column", where)
    check_text(column, name, where, "set data.text_column")
    return column


def _label_column(table: pa.Table, settings: DataSettings, where: str) -> pa.ChunkedArray:
    name = settings.label_column
    column = column_of(table, name, "data.label_column", where)
    check_type(column, name, _LABEL_TYPES, LABELS, where, "set data.label_column")
    return column


def _unit_column(table: pa.Table, name: str, where: str) -> pa.ChunkedArray:
    column = column_of(table, name, "privacy.unit_column", where)
    check_type(column, name, _UNIT_TYPES, "names (integers or text)", where, "set privacy.unit_column")
    return column


def _integers(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Convert labels to integers, also from text or from floats (as pandas writes columns with gaps).

    Returns the labels, and a mask of those that are integers.
    """
    numbers = np.asarray(pd.to_numeric(column.to_pandas(), errors="coerce"), dtype=float)
    whole = (np.abs(numbers) < 2**53) & (numbers == np.floor(numbers))  # larger floats are not exact integers
    return np.where(whole, numbers, 0).astype(np.int64), whole


def label_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column's values as the text that `data.label_names` lists: whole numbers without a point."""
    if pa.types.is_boolean(column.type):
        return np.where(column.to_numpy(), "true", "false").astype(object)
    if pa.types.is_floating(column.type):
        values = column.to_numpy()  # NaN for a gap
        return np.array([_number(value) for value in values], object)
    return column.cast(pa.string()).to_pandas().str.strip().to_numpy(dtype=object)


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else str(value)


_UNIT_TYPES = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)

#: Types of values that `label_values` converts to text, and what columns of them hold.
LABELS = "labels (numbers, text, true and false)"
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


#: Longer names of columns are taken for values.
MAX_NAME_LENGTH = 40


def listed_columns(names: Sequence[str], of: Sequence[str] | None = None) -> str:
    """List columns for an error, unless they may be values: the first record of a file without header.

    Args:
        of: all columns of the table, by which this is told; default, `names`.
    """
    if all(name.isidentifier() and len(name) <= MAX_NAME_LENGTH for name in of or names):
        return f"the columns {', '.join(map(repr, names))}"
    return f"the {len(of or names)} columns (their names look like values; is the header missing?)"


def kind_of(kind: pa.DataType) -> str:
    """Describe a type without field names, which may come from a record."""
    return re.sub(r"\bstruct<.*>", "struct", str(kind), flags=re.DOTALL)
