"""Rows of a large data set in a temporary file instead of in memory."""

from __future__ import annotations

import operator
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

import numpy as np
from jaxtyping import Int

Row = TypeVar("Row")

#: Rows that an iteration reads together.
ROWS_AT_ONCE = 1000


class TemporaryRows(Sequence[Row], Generic[Row]):
    """Rows of different lengths, each read from a file when it is asked for. In memory are 16 bytes of each.

    The file is in the folder that `tempfile` chooses (the environment variable TMPDIR names another). It has no
    name, so that it disappears with this object and its slices, or with the process, even one that is killed. It
    is read without being mapped, so that it does not count as the process's memory.

    Attributes:
        sizes: of the rows, in bytes.
    """

    def __init__(
        self,
        file: _NamelessFile,
        starts: Int[np.ndarray, " rows"],
        sizes: Int[np.ndarray, " rows"],
        decode: Callable[[bytes], Row],
    ) -> None:
        self._file, self._starts, self.sizes, self._decode = file, starts, sizes, decode

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> TemporaryRows[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | TemporaryRows[Row]:
        if isinstance(row, slice):
            return TemporaryRows(self._file, self._starts[row], self.sizes[row], self._decode)
        return self._decode(self._file.read(int(self._starts[row]), int(self.sizes[row])))

    def __iter__(self) -> Iterator[Row]:
        for first in range(0, len(self), ROWS_AT_ONCE):
            starts, sizes = (each[first : first + ROWS_AT_ONCE] for each in (self._starts, self.sizes))
            ends = starts + sizes
            gaps = np.flatnonzero(ends[:-1] != starts[1:]) + 1
            for begin, end in zip([0, *gaps], [*gaps, len(starts)], strict=True):  # rows side by side in the file
                read = self._file.read(int(starts[begin]), int(ends[end - 1] - starts[begin]))
                bounds = (np.array([starts, ends])[:, begin:end] - starts[begin]).T.tolist()
                for start, stop in bounds:
                    yield self._decode(read[start:stop])

    def __eq__(self, other: object) -> bool:
        """Return whether another sequence has the same rows."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    def take(self, rows: Int[np.ndarray, " taken"]) -> TemporaryRows[Row]:
        """Select rows, in the given order."""
        return TemporaryRows(self._file, self._starts[rows], self.sizes[rows], self._decode)


class TemporaryRowsWriter:
    """Writes rows one after another."""

    def __init__(self) -> None:
        self._file = _NamelessFile()
        self._sizes = array("q")

    def extend(self, rows: Iterable[bytes]) -> None:
        for row in rows:
            self._file.stream.write(row)
            self._sizes.append(len(row))

    def finish(self, decode: Callable[[bytes], Row]) -> TemporaryRows[Row]:
        """Return the rows, which are read as `decode` says."""
        self._file.stream.flush()
        sizes = np.frombuffer(self._sizes, np.int64)
        return TemporaryRows(self._file, np.cumsum(sizes) - sizes, sizes, decode)


class _NamelessFile:
    """A temporary file that is closed, and so removed, when nothing refers to it."""

    def __init__(self) -> None:
        self.stream = tempfile.TemporaryFile()  # noqa: SIM115

    def read(self, start: int, size: int) -> bytes:
        content = b""
        while len(content) < size:  # one call reads at most 2 GiB
            part = os.pread(self.stream.fileno(), size - len(content), start + len(content))
            if not part:
                raise EOFError(f"{len(content)} of {size} bytes are left in the temporary file")
            content += part
        return content

    def __del__(self) -> None:
        self.stream.close()
