"""Where labelled texts come from: a file, a folder of files, a data set that `datasets` has saved, or the hub.

Files are read with pyarrow, without a cache. Parquet files and saved data sets are read part by part, CSV and JSON
as a whole, because the types of their columns depend on all rows. The `datasets` library caches what it reads from
the hub, so it is used only for public data and for folders that it has saved. Error messages name files and rows,
never texts, because they end up in logs.
"""

from __future__ import annotations

import csv as standard_csv
import json as standard_json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, json, parquet

from gradmm.config.settings import DataSettings
from gradmm.errors import InputError
from gradmm.storage.hub import hub_or_its_cache

#: Rows of a part.
ROWS_AT_ONCE = 20_000

#: Files by which a folder saved by `datasets` is known: one data set, or one for each split.
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class Source:
    """A table to be read on demand.

    Attributes:
        name: the file, folder or hub data set, for error messages.
        parts: reads the table, which may be large, as tables of at most `ROWS_AT_ONCE` rows with the same columns.
    """

    name: str
    parts: Callable[[], Iterator[pa.Table]]


def sources_of(settings: DataSettings, split: str, names: str | None = None) -> list[Source]:
    """Find the tables of a split.

    Args:
        names: column to read from a CSV as text even if it contains only digits, so that "007" stays "007".

    Raises:
        InputError: if there are none. So does reading one, if it cannot be read.
    """
    if settings.path is None:
        return [_on_the_hub(settings, split)]
    path = Path(os.path.expanduser(settings.path))
    if is_one_split(path):
        if split != settings.train_split:
            name = "validation" if split == settings.validation_split else "test"
            fix = f"set data.{name}_split=null, to hold rows out of train"
            raise InputError(f"holds one split, so there is no split {split!r}", str(path), fix)
        return [_saved(path, None) if path.is_dir() else _in_file(path, names)]
    if os.path.isfile(path / SAVED_SPLITS):
        return [_saved(path, split)]
    return [_in_file(file, names) for file in _split_files(path, split)]


def is_one_split(path: Path) -> bool:
    """Return whether a path holds one split without a name: a data file, or a data set saved by `datasets`."""
    return os.path.isfile(path) or os.path.isfile(path / SAVED_DATASET)


def has_split(path: Path, split: str) -> bool:
    """Return whether a folder has files of a split."""
    if os.path.isfile(path / SAVED_SPLITS):
        return os.path.isdir(path / split)
    return any(_choices(folder, split) for folder in _folders(path))


# --- The library of Hugging Face ----------------------------------------------------------------------------


def _on_the_hub(settings: DataSettings, split: str) -> Source:
    name = str(settings.hub)

    def parts() -> Iterator[pa.Table]:
        import datasets

        try:
            with hub_or_its_cache():
                dataset = datasets.load_dataset(name, settings.hub_config, revision=settings.revision, split=split)
            yield from dataset.with_format("arrow").iter(ROWS_AT_ONCE)
        except Exception as error:  # types of the hub, data set builders and HTTP client
            raise InputError(
                f"cannot be loaded from the hub ({_first_line(str(error)) or type(error).__name__})",
                name,
                "check the names and the network, or set data.path to local files",
            ) from error

    return Source(name, parts)


def _saved(folder: Path, split: str | None) -> Source:
    """Return a split of a folder saved by `datasets`; None: the folder is one data set."""

    def parts() -> Iterator[pa.Table]:
        import datasets

        try:
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:  # of every type, for a broken folder
            problem = f"cannot be read ({_first_line(str(error)) or type(error).__name__})"
            raise InputError(problem, str(folder), "save the data set again") from error
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                what = f"no split {split!r} among {', '.join(map(repr, saved))}"
                raise InputError(what, str(folder), "change the split names under data")
            saved = saved[split]
        yield from saved.with_format("arrow").iter(ROWS_AT_ONCE)

    return Source(str(folder), parts)


# --- Files --------------------------------------------------------------------------------------------------


def _in_file(file: Path, names: str | None) -> Source:
    kind = file.suffix.lower()
    if kind not in _READERS:
        fix = f"convert it to one of {', '.join(_READERS)}"
        raise InputError(f"files that end in {file.suffix!r} are not read", str(file), fix)

    def parts() -> Iterator[pa.Table]:
        try:
            _refuse_utf_16(file)
            for table in _READERS[kind](file, names):
                table.validate(full=True)  # includes a check for UTF-8
                yield table
        except (pa.ArrowException, OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON
            # A column name may come from a record, and span lines.
            message = re.sub(r"Column\(.*\)", "a column", str(error), flags=re.DOTALL)
            # The message quotes a value where a later block has other types than the first.
            message = re.sub(r"(couldn't parse|invalid value).*", "a value of another type", message, flags=re.S)
            problem = _first_line(message) or type(error).__name__
            fix = "change its permissions" if isinstance(error, PermissionError) else "write the file again"
            raise InputError(f"cannot be read ({problem})", str(file), fix) from error

    return Source(str(file), parts)


def _refuse_utf_16(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError("it is UTF-16; save it as UTF-8")


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]


def _folders(path: Path) -> list[Path]:
    """Return the folders that may hold a split's files: a copy of a hub data set has them in data/."""
    return [path, path / "data"] if os.path.isdir(path / "data") else [path]


def _split_files(path: Path, split: str) -> list[Path]:
    """Find a split's files.

    These are `<split>.<format>`, its parts `<split>-00000-of-00002.parquet` ..., or the files in `<split>/`.
    """
    choices = next(filter(None, (_choices(folder, split) for folder in _folders(path))), [])
    if not choices:
        raise InputError(
            f"no {split}.parquet, .csv, .tsv, .jsonl or .json, and no numbered parts",
            str(path),
            f"add the file, put its parts into a folder {split}/, or change the split names under data",
        )
    if len(choices) > 1:
        names = ", ".join(repr(str(choice[0].relative_to(path))) for choice in choices)
        raise InputError(f"split {split!r} exists more than once: {names}", str(path), "keep one")
    _check_all_parts(choices[0], split)
    return choices[0]


def _choices(folder: Path, split: str) -> list[list[Path]]:
    """Return the ways in which a folder holds a split; more than one is an error."""
    part = re.compile(re.escape(split) + r"-\d+.*\.parquet")
    files = _data_files(folder)
    choices = [
        *([file] for file in files if file.stem == split),
        [file for file in files if part.fullmatch(file.name)],
        _data_files(folder / split) if os.path.isdir(folder / split) else [],
    ]
    return [choice for choice in choices if choice]


def _data_files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix.lower() in _READERS and file.is_file())
    except OSError as error:
        problem = f"cannot be listed ({error.strerror})"
        raise InputError(problem, str(folder), "set data.path to a data file, or to a folder of them") from error


def _check_all_parts(files: list[Path], split: str) -> None:
    """Refuse an incomplete copy of a data set."""
    numbers = [re.search(r"-(\d+)-of-(\d+)", file.name) for file in files]
    present = {(int(number[1]), int(number[2])) for number in numbers if number}
    for total in {total for _, total in present}:
        missing = set(range(total)) - {index for index, of in present if of == total}
        if missing:
            problem = f"part {min(missing)} of split {split!r} is missing"
            raise InputError(problem, str(files[0].parent), "copy all its parts")


def _read_parquet(file: Path, _: str | None) -> Iterator[pa.Table]:
    # `read_table` would turn folders named name=value into columns. Without a buffer, whole columns would be read.
    with parquet.ParquetFile(file, buffer_size=2**20) as opened:
        for batch in opened.iter_batches(ROWS_AT_ONCE):
            yield pa.Table.from_batches([batch])


def _read_delimited(file: Path, names: str | None) -> Iterator[pa.Table]:
    try:
        table = csv.read_csv(
            file,
            # One thread, so that rows are numbered.
            csv.ReadOptions(use_threads=False, block_size=_one_block(file)),
            csv.ParseOptions(delimiter=_delimiter(file), newlines_in_values=True),
            csv.ConvertOptions(column_types={} if names is None else {names: pa.string()}),
        )
    except pa.ArrowInvalid as error:
        # The message quotes the row, and counts from 1 with the header.
        ragged = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", str(error))
        if ragged is None:
            raise
        row, expected, found = map(int, ragged.groups())
        raise ValueError(f"row {row - 2} has {found} fields instead of {expected}") from None
    if _delimiter(file) == "\t":
        _refuse_swallowed_rows(table)
    _refuse_stray_quotes(file, table)
    return _parts(table)


def _refuse_swallowed_rows(table: pa.Table) -> None:
    """Refuse a field with tabs and line breaks: rows that an unbalanced quotation mark has made one.

    Raises:
        ValueError: with the number of the first such row.
    """
    for column in table.columns:
        if pa.types.is_string(column.type):
            tabs, breaks = (pc.match_substring(column, each) for each in "\t\n")  # pyright: ignore
            row = pc.index(pc.and_(tabs, breaks), True).as_py()  # pyright: ignore
            if row >= 0:
                raise ValueError(f"row {row} holds other rows, from a quotation mark that is not doubled")


def _refuse_stray_quotes(file: Path, table: pa.Table) -> None:
    """Refuse a quotation mark that is neither closed nor doubled, from which pyarrow makes many rows one field.

    Only a field with line breaks can hold rows, so files without such fields are not read again.

    Raises:
        ValueError: with the number of the first row that has one.
    """
    texts = [column for column in table.columns if pa.types.is_string(column.type)]
    if not any(pc.any(pc.match_substring_regex(column, "[\r\n]")).as_py() for column in texts):  # pyright: ignore
        return
    limit, row = standard_csv.field_size_limit(sys.maxsize), -1  # the header comes first
    try:
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
            for fields in standard_csv.reader(stream, delimiter=_delimiter(file), strict=True):
                row += bool(fields)  # pyarrow leaves out empty lines
    except standard_csv.Error:
        raise ValueError(f"row {row} has a quotation mark that is neither closed nor doubled") from None
    finally:
        standard_csv.field_size_limit(limit)


def _delimiter(file: Path) -> str:
    """Return what separates the fields: a comma, unless only semicolons, tabs or bars divide the header.

    Spreadsheets write semicolons where a comma is the decimal point.
    """
    if file.suffix.lower() == ".tsv":
        return "\t"
    with file.open("rb") as stream:
        header = stream.readline(2**16).decode(errors="replace").encode()  # or the handler of bad rows fails
    fields = {each: _fields(header, each) for each in (",", ";", "\t", "|")}
    return "," if fields[","] > 1 else max(fields, key=lambda each: fields[each])


def _fields(header: bytes, delimiter: str) -> int:
    """Count the fields of a header; 0 if it has none. Rows may follow, where only carriage returns end lines."""
    options = csv.ParseOptions(delimiter=delimiter, invalid_row_handler=lambda _: "skip")
    try:
        return csv.read_csv(pa.BufferReader(header), parse_options=options).num_columns
    except pa.ArrowInvalid:
        return 0


def _read_json(file: Path, _: str | None) -> Iterator[pa.Table]:
    """Read JSON lines, or a JSON array of records."""
    with file.open("rb") as stream:
        is_array = stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if is_array:
        return _parts(_table_of(standard_json.loads(file.read_text(encoding="utf-8-sig"))))
    return _parts(json.read_json(file, json.ReadOptions(block_size=_one_block(file))))


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, ROWS_AT_ONCE):
        yield table.slice(start, ROWS_AT_ONCE)


def _table_of(records: list[Any]) -> pa.Table:
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("a JSON array of something else than records")
    try:
        return pa.Table.from_pylist(records)
    except (pa.ArrowException, TypeError, OverflowError):  # whose message would quote a value
        raise ValueError("a column has values of different types") from None


def _one_block(file: Path) -> int:
    """Return a block size for the whole file. pyarrow's default of 1 MiB is too small for long texts."""
    return min(file.stat().st_size + 1, 2**30)


_READERS = {
    ".parquet": _read_parquet,
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".jsonl": _read_json,
    ".json": _read_json,
}
