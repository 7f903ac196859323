"""Reading labelled texts, and splitting them without coupling records.

The steps below are applied to a split in this order. Each states its effect on the guarantee (per record).

1. Strip whitespace around texts. Refuse or drop labels of no class. Refuse empty texts, or drop them from train if
   `min_words` is at least 1. Every record is treated independently.
2. Without a validation split, hold out `validation_rows` rows of train: those whose texts have the smallest keyed
   hashes; without a test split, the next `test_rows`. Adding a record moves at most one other record from
   validation to test, and one from test to train. Train thus changes by exactly one record, and a sum over train
   keeps its sensitivity. (A shuffle or a stratified split lacks this property.) Equal texts have adjacent ranks,
   so at most one text is in two neighbouring parts. With a unit column, whole units are held out, by the hashes of
   their names; all this then holds for units.
3. Drop rows of train and validation with fewer than `min_words` words. Every record is treated independently. The
   audits compare train with validation rows, which therefore have to be alike.
4. Keep at most `max_per_class` train rows of each class: those with the smallest keyed hashes. **This couples
   records**: in a class with more rows, adding a record displaces another, so the sensitivity doubles. `Recipe`
   refuses it in a private run.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import pandas as pd
import pyarrow as pa
from jaxtyping import Int, UInt64

from gradmm.config.settings import DataSettings
from gradmm.data.columns import NO_NAMES, usable_rows
from gradmm.data.sources import Source, sources_of
from gradmm.errors import InputError, together
from gradmm.storage.temporary_rows import TemporaryRows, TemporaryRowsWriter


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and their labels, one of each per row.

    Attributes:
        texts: those of files are read from a temporary file when they are used (`TemporaryRows`).
        units: the unit of privacy that each row belongs to, numbered by their first rows; None if each row is one.
        unit_names: the units' names, which a ledger recognises units by; private.
    """

    texts: Sequence[str]
    labels: tuple[int, ...]
    units: tuple[int, ...] | None = None
    unit_names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise ValueError(f"{len(self.texts)} texts, but {len(self.labels)} labels")
        if self.units is not None and len(self.texts) != len(self.units):
            raise ValueError(f"{len(self.texts)} texts, but {len(self.units)} units")

    @classmethod
    def of(
        cls, texts: Iterable[object], labels: Iterable[int], units: Iterable[Hashable] | None = None
    ) -> LabelledTexts:
        """Take texts in memory: lists, arrays, or columns of a data frame.

        As from files, white space around a text is removed.

        Args:
            texts: anything but a string counts as a missing text.
            labels: integers, those of the recipe's classes.
            units: names of the units of privacy, such as user ids. None: each row is a unit. As in a file, 1,
                1.0 and "1" are one name, and white space around names is removed.

        Raises:
            InputError: for a row without a text or without a unit. The message has the row's number, not its text.
            TypeError: for a label that is not an integer.
            ValueError: for different numbers of texts, labels and units.

        >>> LabelledTexts.of(["We loved it. ", "Never again."], [1, 0], units=["ann", "bob"])
        LabelledTexts(texts=('We loved it.', 'Never again.'), labels=(1, 0), units=(0, 1))
        """
        stripped = tuple(text.strip() if isinstance(text, str) else "" for text in texts)
        names = None if units is None else np.array([_unit_name(unit) for unit in units], dtype=object)
        numbers, different = _numbered(names)
        for what, missing in (("text", [not text for text in stripped]), ("unit", [n < 0 for n in numbers or ()])):
            if any(missing):
                raise InputError(f"row {missing.index(True)} has no {what}", "data", "remove the row")
        return cls(stripped, tuple(map(operator.index, labels)), numbers, different)

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the number of rows, all labels, lengths in bytes, texts and units, in row order."""
        digest = hashlib.sha256(np.array([len(self)], dtype="<i8").tobytes())
        digest.update(np.array(self.labels, dtype="<i8").tobytes())
        lengths = np.fromiter((len(text.encode()) for text in self.texts), "<i8", len(self))
        digest.update(lengths.tobytes())
        for text in self.texts:  # one by one: a million joined texts take most of a gigabyte
            digest.update(text.encode())
        if self.units is not None:
            digest.update(np.array(self.units, dtype="<i8").tobytes())
        return digest.hexdigest()

    def of_class(self, label: int) -> Int[np.ndarray, " rows"]:
        """Return the numbers of the rows with this label."""
        return np.flatnonzero(np.array(self.labels, dtype=np.int64) == label)

    def first_of_units(self, rows_per_unit: int) -> list[int]:
        """Return the numbers of each unit's first rows, at most `rows_per_unit` of them, in row order."""
        assert self.units is not None
        counts: Counter[int] = Counter()
        rows = []
        for row, unit in enumerate(self.units):
            if counts[unit] < rows_per_unit:
                rows.append(row)
                counts[unit] += 1
        return rows

    def used(self, rows_per_unit: int | None) -> LabelledTexts:
        """Return the records that a target is computed from: `first_of_units`, or all if there are no units."""
        return self if rows_per_unit is None else self.take(self.first_of_units(rows_per_unit))

    def take(self, rows: Sequence[int]) -> LabelledTexts:
        """Select rows, in the given order, into memory."""
        return LabelledTexts(
            tuple(self.texts[row] for row in rows),
            tuple(self.labels[row] for row in rows),
            None if self.units is None else tuple(self.units[row] for row in rows),
            self.unit_names,
        )


@dataclass(frozen=True)
class Splits:
    """The three splits of a data set."""

    train: LabelledTexts
    validation: LabelledTexts
    test: LabelledTexts


def check_splits(settings: DataSettings) -> None:
    """Check that a local data set has a file for each split, without reading any.

    Raises:
        InputError: with all splits that have none.
    """
    names = (settings.train_split, settings.validation_split, settings.test_split)
    together(*(partial(sources_of, settings, name) for name in names if name is not None))


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
    splits = {"validation": settings.validation_split, "test": settings.test_split}
    named = {part: split for part, split in splits.items() if split is not None}
    train, *given = together(
        lambda: _read_split(settings, settings.train_split, labels, unit_column),
        *(partial(_read_split, settings, split, labels) for split in named.values()),
    )
    counts = {"validation": settings.validation_rows, "test": settings.test_rows}
    unnamed = {part: count for part, count in counts.items() if part not in named}
    train, held_out = _hold_out(train, unnamed, settings, seed)
    train = _with_enough_words(train, settings.min_words)
    if settings.max_per_class is not None:
        train = _at_most_per_class(train, settings.max_per_class, seed)
    others = held_out | dict(zip(named, given, strict=True))
    others["validation"] = _with_enough_words(others["validation"], settings.min_words)
    lower_words = ["min_words"] if settings.min_words else []
    lower = [*lower_words, *(f"{part}_rows" for part in unnamed)]
    return Splits(
        *together(
            partial(_labelled_texts, train, labels, f"split {settings.train_split!r}", _or("lower", lower)),
            *(
                partial(
                    _labelled_texts,
                    others[part],
                    labels,
                    f"split {split!r}",
                    _or("lower", lower_words if part == "validation" else []),
                )
                if split
                else partial(
                    _labelled_texts,
                    others[part],
                    labels,
                    f"the rows held out for {part}",
                    _or("raise", [f"{part}_rows"]),
                )
                for part, split in splits.items()
            ),
        )
    )


def _or(what: str, settings: Sequence[str]) -> str:
    return f", or {what} {' or '.join(f'data.{name}' for name in settings)}" if settings else ""


@dataclass(frozen=True, eq=False)
class SplitRows:
    """The usable rows of a split: texts, labels (int64), and names of units if there are any."""

    texts: TemporaryRows[str]
    labels: np.ndarray
    units: np.ndarray | None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, which: np.ndarray) -> SplitRows:
        """Select rows by a mask or by row numbers."""
        rows = np.arange(len(self))[which]
        return SplitRows(
            self.texts.take(rows), self.labels[rows], None if self.units is None else self.units[rows]
        )


def _labelled_texts(rows: SplitRows, labels: Sequence[int], name: str, or_change: str = "") -> LabelledTexts:
    absent = np.setdiff1d(labels, rows.labels)
    if len(absent):
        raise InputError(
            f"no row of {name} has the label {absent[0]}",
            "data",
            f"add rows, or remove the class{or_change}",
        )
    return LabelledTexts(rows.texts, tuple(rows.labels.tolist()), *_numbered(rows.units))


def _numbered(names: np.ndarray | None) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Number units by their first rows; return each row's number, -1 without a name, and the names by number."""
    if names is None:
        return None, ()
    numbers, different = pd.factorize(names)
    return tuple(numbers.tolist()), tuple(map(str, different))


def _unit_name(unit: Hashable) -> str | None:
    """Return a unit's name as text, as a file has it, without white space around it; None if it names nothing."""
    if isinstance(unit, float | np.floating) and unit.is_integer():
        unit = int(unit)
    name = str(unit).strip()
    return None if name in NO_NAMES else name


# --- Which rows are used ------------------------------------------------------------------------------------


def _hold_out(
    rows: SplitRows, counts: Mapping[str, int], settings: DataSettings, seed: int
) -> tuple[SplitRows, dict[str, SplitRows]]:
    """Split rows into train and the held-out parts, each in file order. See step 2 above for the use of hashes.

    Args:
        counts: rows (or units, if there are any) of each part, in the order in which they are taken.
    """
    if not counts:
        return rows, {}
    if rows.units is None:
        kind, own, order = "rows", np.arange(len(rows)), _hash_order(rows, "validation", seed)
    else:
        units, own = np.unique(rows.units, return_inverse=True)
        kind, order = "units", np.argsort(_hashes(units.tolist(), "validation", seed))
    total, wanted = len(order), sum(counts.values())
    if total < 2 * wanted:
        raise InputError(
            f"{wanted} {kind} for {' and '.join(counts)} cannot be held out of the {total} {kind} of split "
            f"{settings.train_split!r}",
            " and ".join(f"data.{part}_rows" for part in counts),
            f"hold out at most half ({total // 2}), or set data.{next(iter(counts))}_split",
        )
    bounds = np.cumsum([0, *counts.values()])
    chosen = {
        part: np.isin(own, order[start:end]) for part, start, end in zip(counts, bounds, bounds[1:], strict=False)
    }
    return rows[~np.isin(own, order[:wanted])], {part: rows[mask] for part, mask in chosen.items()}


def _with_enough_words(rows: SplitRows, min_words: int) -> SplitRows:
    return rows[np.fromiter((len(text.split()) >= min_words for text in rows.texts), bool, len(rows))]


def _at_most_per_class(rows: SplitRows, count: int, seed: int) -> SplitRows:
    order = _hash_order(rows, "max_per_class", seed)
    chosen = [order[rows.labels[order] == label][:count] for label in np.unique(rows.labels)]
    return rows[np.sort(np.concatenate(chosen))]


def _hash_order(rows: SplitRows, purpose: str, seed: int) -> np.ndarray:
    """Return row numbers in a random order in which the relative order of two rows depends on these two alone.

    Sorts by the texts' hashes, keyed with purpose and seed; equal texts by label.
    """
    return np.lexsort((rows.labels, _hashes(rows.texts, purpose, seed)))


def _hashes(words: Collection[str], purpose: str, seed: int) -> UInt64[np.ndarray, " words"]:
    """Hash texts or names to integers, keyed with purpose and seed."""
    return keyed_hashes(words, f"{purpose} {seed}".encode())


def keyed_hashes(words: Iterable[str], key: bytes) -> UInt64[np.ndarray, " words"]:
    """Hash texts to integers of 64 bits by BLAKE2b; without the key a hash says nothing of its text."""
    hashes = (hashlib.blake2b(word.encode(), key=key, digest_size=8).digest() for word in words)
    return np.fromiter((int.from_bytes(digest, "little") for digest in hashes), np.uint64)


def _read_split(
    settings: DataSettings, split: str, labels: Sequence[int], unit_column: str | None = None
) -> SplitRows:
    """Read the usable rows of a split: stripped, non-empty texts with labels among `labels`."""
    drops_empty = split == settings.train_split and settings.min_words > 0
    texts, own_labels, units = TemporaryRowsWriter(), [np.empty(0, np.int64)], []

    rows_of_files = []

    def counted(source: Source) -> Iterator[pa.Table]:
        for table in source.parts():
            rows_of_files.append(table.num_rows)
            yield table

    def read(source: Source) -> None:
        for rows in usable_rows(counted(source), source.name, settings, labels, drops_empty, unit_column):
            texts.extend(text.encode() for text in rows.texts)
            own_labels.append(rows.labels)
            units.extend([] if rows.units is None else [rows.units])

    sources = sources_of(settings, split, unit_column)
    together(*(partial(read, source) for source in sources))
    if not any(rows_of_files):
        raise InputError("contains no rows", sources[0].name, "add rows, or choose another split")
    return SplitRows(
        texts.finish(bytes.decode), np.concatenate(own_labels), np.concatenate(units) if units else None
    )
