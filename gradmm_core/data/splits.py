"""Reading labelled texts, and splitting them without coupling records.

Local files are read with pyarrow, without a cache. The `datasets` library caches its data and is used only for
public data from the hub. Error messages name rows, never texts, because they end up in logs.

The steps below are applied to a split in this order. Each states its effect on the guarantee (per record).

1. Strip whitespace around texts. Refuse or drop labels of no class. Refuse empty texts, or drop them from train if
   `min_words` is at least 1. Every record is treated independently.
2. Without a validation split, hold out `validation_rows` rows of train: those whose texts have the smallest keyed
   hashes. Adding a record moves at most one other record from validation to train. Train thus changes by exactly
   one record, and a sum over train keeps its sensitivity. (A shuffle or a stratified split lacks this property.)
   Equal texts have adjacent ranks, so at most one text is in both validation and train. With a unit column, whole
   units are held out, by the hashes of their names; all this then holds for units.
3. Drop train rows with fewer than `min_words` words. Every record is treated independently.
4. Keep at most `max_per_class` train rows of each class: those with the smallest keyed hashes. **This couples
   records**: in a class with more rows, adding a record displaces another, so the sensitivity doubles. `Recipe`
   refuses it in a private run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv, json, parquet

from gradmm.config.settings import DataSettings
from gradmm.errors import InputError
from gradmm.storage.hub import hub_or_its_cache


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and their labels, one of each per row.

    Attributes:
        units: the unit of privacy that each row belongs to, numbered by their first rows; None if each row is one.
    """

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    units: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise ValueError(f"{len(self.texts)} texts, but {len(self.labels)} labels")
        if self.units is not None and len(self.texts) != len(self.units):
            raise ValueError(f"{len(self.texts)} texts, but {len(self.units)} units")

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the number of rows, all labels, lengths in bytes, texts and units, in row order."""
        lengths = np.fromiter((len(text.encode()) for text in self.texts), "<i8", len(self))
        digest = hashlib.sha256(np.array([len(self), *self.labels], dtype="<i8").tobytes() + lengths.tobytes())
        for text in self.texts:  # one by one: a million joined texts take most of a gigabyte
            digest.update(text.encode())
        if self.units is not None:
            digest.update(np.array(self.units, dtype="<i8").tobytes())
        return digest.hexdigest()

    def of_class(self, label: int) -> list[int]:
        """Return the numbers of the rows with this label."""
        return [row for row, other in enumerate(self.labels) if other == label]

    def take(self, rows: Sequence[int]) -> LabelledTexts:
        """Select rows, in the given order."""
        return LabelledTexts(
            tuple(self.texts[row] for row in rows),
            tuple(self.labels[row] for row in rows),
            None if self.units is None else tuple(self.units[row] for row in rows),
        )


@dataclass(frozen=True)
class Splits:
    """The three splits of a data set."""

    train: LabelledTexts
    validation: LabelledTexts
    test: LabelledTexts


def load_splits(
    settings: DataSettings, labels: Sequence[int], seed: int, unit_column: str | None = None
) -> Splits:
    """Read a data set and prepare its splits by the steps in the module docstring.

    Args:
        labels: the labels of the classes. Each must occur in every split.
        seed: selects the rows held out for validation and those kept by `max_per_class`.
        unit_column: names the unit of privacy of each row of train. None: each row is a unit.

    Raises:
        InputError: for invalid files, columns, texts or labels, and for a class without rows.
    """
    train = _read_split(settings, settings.train_split, labels, unit_column)
    if settings.validation_split is None:
        validation_name = f"the rows held out of split {settings.train_split!r}"
        train, validation = _hold_out(train, settings, seed)
    else:
        validation_name = f"split {settings.validation_split!r}"
        validation = _read_split(settings, settings.validation_split, labels)
    test = _read_split(settings, settings.test_split, labels)
    train = _with_enough_words(train, settings.min_words)
    if settings.max_per_class is not None:
        train = _at_most_per_class(train, settings.max_per_class, seed)
    return Splits(
        _labelled_texts(train, labels, f"split {settings.train_split!r}"),
        _labelled_texts(validation, labels, validation_name),
        _labelled_texts(test, labels, f"split {settings.test_split!r}"),
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """A split being processed: texts (object array), labels (int64), and names of units if there are any."""

    texts: np.ndarray
    labels: np.ndarray
    units: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, which: np.ndarray) -> _Rows:
        """Select rows by a mask or by row numbers."""
        return _Rows(self.texts[which], self.labels[which], None if self.units is None else self.units[which])


def _labelled_texts(rows: _Rows, labels: Sequence[int], name: str) -> LabelledTexts:
    absent = np.setdiff1d(labels, rows.labels)
    if len(absent):
        raise InputError(
            f"no row of {name} has the label {absent[0]}",
            "data",
            "add rows, remove the class, or lower data.min_words or data.validation_rows",
        )
    units = None if rows.units is None else tuple(pd.factorize(rows.units)[0].tolist())
    return LabelledTexts(tuple(rows.texts.tolist()), tuple(rows.labels.tolist()), units)


# --- Which rows are used ------------------------------------------------------------------------------------


def _hold_out(rows: _Rows, settings: DataSettings, seed: int) -> tuple[_Rows, _Rows]:
    """Split rows into train and validation, each in file order. See step 2 above for the use of hashes."""
    count, split = settings.validation_rows, settings.train_split
    if rows.units is None:
        kind, own, order = "rows", np.arange(len(rows)), _hash_order(rows, "validation", seed)
    else:
        units, own = np.unique(rows.units, return_inverse=True)
        kind, order = "units", np.argsort(_hashes(units, "validation", seed))
    total = len(order)
    if total < 2 * count:
        raise InputError(
            f"{count} validation {kind} cannot be held out of the {total} {kind} of split {split!r}",
            "data.validation_rows",
            f"hold out at most half ({total // 2}), or set data.validation_split",
        )
    held_out = np.isin(own, order[:count])
    return rows[~held_out], rows[held_out]


def _with_enough_words(rows: _Rows, min_words: int) -> _Rows:
    return rows[np.array([len(text.split()) >= min_words for text in rows.texts], dtype=bool)]


def _at_most_per_class(rows: _Rows, count: int, seed: int) -> _Rows:
    order = _hash_order(rows, "max_per_class", seed)
    chosen = [order[rows.labels[order] == label][:count] for label in np.unique(rows.labels)]
    return rows[np.sort(np.concatenate(chosen))]


def _hash_order(rows: _Rows, purpose: str, seed: int) -> np.ndarray:
    """Return row numbers in a random order in which the relative order of two rows depends on these two alone.

    Sorts by the texts' hashes, keyed with purpose and seed; equal texts by label.
    """
    return np.lexsort((rows.labels, _hashes(rows.texts, purpose, seed)))


def _hashes(words: np.ndarray, purpose: str, seed: int) -> np.ndarray:
    """Hash texts or names to integers, keyed with purpose and seed."""
    key = f"{purpose} {seed}".encode()
    hashes = [hashlib.blake2b(word.encode(), key=key, digest_size=8).digest() for word in words]
    return np.frombuffer(b"".join(hashes), dtype="<u8")


# --- From tables to rows ------------------------------------------------------------------------------------


def _read_split(
    settings: DataSettings, split: str, labels: Sequence[int], unit_column: str | None = None
) -> _Rows:
    """Read the usable rows of a split: stripped, non-empty texts with labels among `labels`."""
    tables = _hub_tables(settings, split) if settings.path is None else _local_tables(settings.path, split)
    drops_empty = split == settings.train_split and settings.min_words > 0
    parts = [_usable_rows(table, where, settings, labels, drops_empty, unit_column) for where, table in tables]
    units = [part.units for part in parts if part.units is not None]
    return _Rows(
        np.concatenate([part.texts for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate(units) if units else None,
    )


def _usable_rows(
    table: pa.Table,
    where: str,
    settings: DataSettings,
    labels: Sequence[int],
    drops_empty: bool,
    unit_column: str | None,
) -> _Rows:
    if table.num_rows == 0:
        raise InputError("contains no rows", where, "add rows, or choose another split")
    text_column = settings.text_column or _default_text_column(table.column_names, where)
    units = None if unit_column is None else _units(table, unit_column, where)
    rows = _Rows(_texts(table, text_column, where), _labels(table, settings.label_column, where), units)
    known = np.isin(rows.labels, labels)
    if not known.all() and not settings.drop_other_labels:
        row = known.argmin()
        raise InputError(
            f"row {row} has the label {rows.labels[row]}, which belongs to no class",
            where,
            "add a class, or set data.drop_other_labels=true",
        )
    empty = known & (rows.texts == "")
    if empty.any() and not drops_empty:
        raise InputError(
            f"row {empty.argmax()} has an empty text", where, "remove it (for train, data.min_words=1 does this)"
        )
    return rows[known & ~empty]


def _default_text_column(names: Sequence[str], where: str) -> str:
    candidates = {"text", "sentence"}.intersection(names)
    if len(candidates) != 1:
        raise InputError(
            f"{'both' if candidates else 'neither'} of 'text' and 'sentence' found among {_columns(names)}",
            where,
            "set data.text_column",
        )
    return candidates.pop()


def _texts(table: pa.Table, name: str, where: str) -> np.ndarray:
    column = _column(table, name, "data.text_column", where)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise InputError(
            f"the column {name!r} holds {_kind(column.type)}, not text", where, "set data.text_column"
        )
    if column.null_count:
        row = column.is_null().to_numpy().argmax()
        raise InputError(f"row {row} has no text", where, "remove the row")
    return column.to_pandas().str.strip().to_numpy(dtype=object)


def _labels(table: pa.Table, name: str, where: str) -> np.ndarray:
    """Convert labels to integers, also from text or from floats (as pandas writes columns with gaps)."""
    column = _column(table, name, "data.label_column", where)
    if not any(is_type(column.type) for is_type in _LABEL_TYPES):
        problem = f"the column {name!r} holds {_kind(column.type)}, not integers"
        raise InputError(problem, where, "set data.label_column")
    numbers = np.asarray(pd.to_numeric(column.to_pandas(), errors="coerce"), dtype=float)
    whole = (np.abs(numbers) < 2**53) & (numbers == np.floor(numbers))  # larger floats are not exact integers
    if not whole.all():
        row = int(whole.argmin())
        problem = "a label that is not an integer" if column[row].is_valid else "no label"
        raise InputError(f"row {row} has {problem}", where, "label the classes with integers")
    return numbers.astype(np.int64)


def _units(table: pa.Table, name: str, where: str) -> np.ndarray:
    """Read the names of units, integers or text, as text."""
    column = _column(table, name, "privacy.unit_column", where)
    if not any(is_type(column.type) for is_type in _UNIT_TYPES):
        problem = f"the column {name!r} holds {_kind(column.type)}, neither integers nor text"
        raise InputError(problem, where, "set privacy.unit_column")
    if column.null_count:
        row = column.is_null().to_numpy().argmax()
        raise InputError(f"row {row} has no unit", where, f"fill the column {name!r}, or remove the row")
    return column.cast(pa.string()).to_pandas().to_numpy(dtype=object)


_UNIT_TYPES = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)

_LABEL_TYPES = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_null,
)


def _column(table: pa.Table, name: str, setting: str, where: str) -> pa.ChunkedArray:
    count = table.column_names.count(name)
    if count == 0:
        problem = f"no column {name!r} among {_columns(table.column_names)}"
        raise InputError(problem, where, f"set {setting}")
    if count > 1:
        raise InputError(f"{count} columns are called {name!r}", where, "rename all but one")
    column = table[name]
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _columns(names: Sequence[str]) -> str:
    """List the columns for an error, unless they may be values: the first record of a file without header."""
    if all(name.isidentifier() and len(name) <= _MAX_NAME_LENGTH for name in names):
        return f"the columns {_listed(names)}"
    return f"the {len(names)} columns (their names look like values; is the header missing?)"


_MAX_NAME_LENGTH = 40


def _kind(kind: pa.DataType) -> str:
    """Describe a type without field names, which may come from a record."""
    return re.sub(r"\bstruct<.*>", "struct", str(kind), flags=re.DOTALL)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


# --- Sources ------------------------------------------------------------------------------------------------


def _hub_tables(settings: DataSettings, split: str) -> Iterator[tuple[str, pa.Table]]:
    import datasets

    where = f"{settings.hub}, split {split!r}"
    try:
        with hub_or_its_cache():
            dataset = datasets.load_dataset(
                str(settings.hub), settings.hub_config, revision=settings.revision, split=split
            )
        table = dataset.with_format("arrow")[:]
    except Exception as error:  # types of the hub, data set builders and HTTP client
        raise InputError(
            f"cannot be loaded from the hub ({_first_line(str(error)) or type(error).__name__})",
            where,
            "check the names and the network, or set data.path to a folder of local files",
        ) from error
    yield where, table


def _local_tables(folder: str, split: str) -> Iterator[tuple[str, pa.Table]]:
    for file in _split_files(Path(os.path.expanduser(folder)), split):
        try:
            table = _READERS[file.suffix](file)
            table.validate(full=True)  # includes a check for UTF-8
        except (
            pa.ArrowException,
            OSError,
            UnicodeDecodeError,
        ) as error:  # UnicodeDecodeError: in a column name
            # A column name may come from a record, and span lines.
            message = re.sub(r"Column\(.*\)", "a column", str(error), flags=re.DOTALL)
            problem = _first_line(message) or type(error).__name__
            raise InputError(f"cannot be read ({problem})", str(file), "write the file again") from error
        yield str(file), table


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]


def _split_files(folder: Path, split: str) -> list[Path]:
    """Find `<split>.<format>`, its parts `<split>-00000-of-00002.parquet` ..., or the files in `<split>/`."""
    part = re.compile(re.escape(split) + r"-\d+.*\.parquet")
    files = _data_files(folder)
    choices = [
        *([file] for file in files if file.stem == split),
        [file for file in files if part.fullmatch(file.name)],
        _data_files(folder / split) if os.path.isdir(folder / split) else [],
    ]
    choices = [choice for choice in choices if choice]
    if not choices:
        raise InputError(
            f"no {split}.parquet, .csv, .jsonl or .json, and no numbered parts",
            str(folder),
            "add the file, or change the split names under data",
        )
    if len(choices) > 1:
        names = _listed([str(choice[0].relative_to(folder)) for choice in choices])
        raise InputError(f"split {split!r} exists more than once: {names}", str(folder), "keep one")
    _check_all_parts(choices[0], split)
    return choices[0]


def _data_files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in _READERS and file.is_file())
    except OSError as error:
        problem = f"cannot be listed ({error.strerror})"
        raise InputError(problem, str(folder), "set data.path to a folder of data files") from error


def _check_all_parts(files: list[Path], split: str) -> None:
    """Refuse an incomplete copy of a data set."""
    numbers = [re.search(r"-(\d+)-of-(\d+)", file.name) for file in files]
    present = {(int(number[1]), int(number[2])) for number in numbers if number}
    for total in {total for _, total in present}:
        missing = set(range(total)) - {index for index, of in present if of == total}
        if missing:
            problem = f"part {min(missing)} of split {split!r} is missing"
            raise InputError(problem, str(files[0].parent), "copy all its parts")


def _read_csv(file: Path) -> pa.Table:
    ragged: list[csv.InvalidRow] = []

    def note(row: csv.InvalidRow) -> str:
        ragged.append(row)
        return "skip"

    table = csv.read_csv(
        file,
        # One thread, so that rows are numbered (the header is 1). pyarrow's own message quotes the row.
        csv.ReadOptions(use_threads=False, block_size=_one_block(file)),
        csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
    )
    if ragged:
        row = ragged[0]
        raise pa.ArrowInvalid(
            f"row {row.number - 2} has {row.actual_columns} fields instead of {row.expected_columns}"
        )
    return table


def _read_json_lines(file: Path) -> pa.Table:
    return json.read_json(file, json.ReadOptions(block_size=_one_block(file)))


def _one_block(file: Path) -> int:
    """Return a block size for the whole file. pyarrow's default of 1 MiB is too small for long texts."""
    return min(file.stat().st_size + 1, 2**30)


_READERS = {
    # `read_table` would turn folders named name=value into columns.
    ".parquet": lambda file: parquet.ParquetFile(file).read(),
    ".csv": _read_csv,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
}
