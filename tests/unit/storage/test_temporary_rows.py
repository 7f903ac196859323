"""Rows in a temporary file are those that were written, and the file is gone with them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.storage import temporary_rows
from gradmm.storage.temporary_rows import TemporaryRows, TemporaryRowsWriter

ROWS = st.lists(st.binary(max_size=9), max_size=8)


def written(*parts: list[bytes]) -> TemporaryRows[bytes]:
    writer = TemporaryRowsWriter()
    for part in parts:
        writer.extend(part)
    return writer.finish(bytes)


@given(parts=st.lists(ROWS, max_size=3), data=st.data())
def test_rows_are_read_as_a_list_would_be(parts: list[list[bytes]], data: st.DataObject) -> None:
    rows, expected = written(*parts), [row for part in parts for row in part]
    taken = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=12)) if expected else []
    begin, end, step = data.draw(st.tuples(st.integers(-9, 30), st.integers(-9, 30), st.sampled_from([1, 2, -1])))
    for read, same in (
        (rows, expected),
        (rows.take(np.array(taken, dtype=np.int64)), [expected[row] for row in taken]),
        (rows[begin:end:step], expected[begin:end:step]),
    ):
        assert list(read) == same  # by blocks
        assert [read[row] for row in range(len(read))] == same  # one by one
        assert read.sizes.tolist() == [len(row) for row in same]
        assert read == same
        assert read != [*same, b""]


def test_blocks_do_not_show() -> None:
    expected = [str(row).encode() for row in range(2 * temporary_rows.ROWS_AT_ONCE + 1)]
    rows = written(expected)
    assert list(rows) == expected
    odd = np.arange(1, len(expected), 2)
    assert list(rows.take(odd)) == expected[1::2]
    assert list(rows.take(odd[::-1])) == expected[1::2][::-1]


def test_a_system_that_reads_less_than_was_asked_for_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does above 2 GiB."""
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: whole(file, min(size, 7), start))
    expected = [b"a" * size for size in (20, 0, 3, 9)]
    assert list(written(expected)) == expected
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(EOFError, match="0 of 32 bytes"):
        list(written(expected))


def test_rows_are_decoded() -> None:
    writer = TemporaryRowsWriter()
    writer.extend(text.encode() for text in ("déjà vu", "日本語 🙂", ""))
    assert list(writer.finish(bytes.decode)) == ["déjà vu", "日本語 🙂", ""]


def test_the_file_has_no_name_and_goes_with_the_last_slice() -> None:
    def open_files() -> set[str]:
        return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    rows = written([b"a", b"b"])
    last = rows[1:]
    del rows
    assert list(last) == [b"b"]
    assert any(name.endswith("(deleted)") for name in open_files())
    del last
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
