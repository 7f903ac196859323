"""Store a ledger's lines: in one file under a lock, or as one object each in an object store.

A line is appended only if no line was appended since its writer last read. For a file, the lock ensures this. An
object store has no lock: line n is created on the condition that it does not exist. The second of two writers
fails, reads again and decides again. So no line is lost, and each line depends only on lines that its writer read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from upath import UPath

from gradmm.errors import InputError
from gradmm.storage.location import create, objects_in, storage_errors

#: Errors of a place where no lock can be made, but files may be read.
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

#: How long to wait for other runs that release from the same data.
LOCK_SECONDS = 600.0


@dataclass(frozen=True)
class LinesOfFile:
    """The lines of one file, with its .lock beside it."""

    file: Path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other threads, processes and machines. Re-entrant.

        Raises:
            InputError: if the lock is not available in time, or the folder is not writable.
        """
        # A singleton: all ledgers of the file share one lock object while it is held, so that a thread can
        # re-enter it. The object is not kept longer, because a forked process must create its own.
        lock = FileLock(f"{self.file}.lock", mode=0o600, is_singleton=True)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            raise _busy(lock.lock_file) from error
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield
        finally:
            lock.release()

    @property
    def locked(self) -> bool:
        """Whether this thread holds the lock."""
        return FileLock(f"{self.file}.lock", mode=0o600, is_singleton=True).is_locked

    def read(self) -> list[bytes]:
        """Read all lines, without their newlines."""
        if not self.file.exists():
            return []  # do not create files by reading
        try:
            with self.lock():
                return self._complete_lines()[0]
        except InputError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in READ_ONLY):
                raise
            return self._complete_lines()[0]  # without a line that somebody is writing

    def append(self, line: bytes, after: int) -> bool:
        """Append a line after the `after` lines that were read; return only once it is on disk. Needs the lock."""
        _, content = self._complete_lines()
        try:
            descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as stream:
                stream.truncate(len(content))
                stream.write((line if content[-1:] in (b"", b"\n") else b"\n" + line) + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            # A new file's name is on disk only once its folder is synced; the folder may be new too.
            _sync_folder(self.file.parent)
            _sync_folder(self.file.parent.parent)
        except OSError as error:
            raise self._unwritable(error) from error
        return True

    def _complete_lines(self) -> tuple[list[bytes], bytes]:
        """Return the lines, and the bytes that contain them, without a truncated last line."""
        content = self.file.read_bytes() if self.file.exists() else b""
        *lines, tail = content.split(b"\n")
        if _is_truncated(tail):
            # The process died while writing this line. Its intent was not on disk, so no noise had been drawn.
            return lines, content.removesuffix(tail)
        return [*lines, tail], content

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"the privacy ledger cannot be written ({error.strerror})",
            str(self.file),
            "free disk space, or grant write permission",
        )


@dataclass(frozen=True)
class LinesOfObjects:
    """One object per line: line n is `<folder>/<n, in 8 digits>.json`."""

    folder: UPath
    locked = False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude nobody: `append` detects other writers."""
        yield

    def read(self) -> list[bytes]:
        """Read all lines.

        Raises:
            InputError: if a line before the last one is missing.
        """
        lines = [name for name in objects_in(self.folder) if re.fullmatch(r"\d{8}\.json", name.rpartition("/")[2])]
        for number, name in enumerate(lines, 1):
            if not name.endswith(f"/{number:08}.json"):
                raise InputError(
                    f"line {number} is missing",
                    str(self.folder),
                    "restore it from a backup; nothing was released",
                )
        with storage_errors(self.folder):
            contents: Any = self.folder.fs.cat(lines) if lines else {}
        return [contents[name] for name in lines]

    def append(self, line: bytes, after: int) -> bool:
        """Append a line after the `after` lines that were read; False if another line was appended since."""
        try:
            create(self.folder / f"{after + 1:08}.json", line)
        except FileExistsError:
            return False
        return True


def tries(where: Path | UPath) -> Iterator[None]:
    """Yield once per attempt, until the wait for other runs is over.

    Raises:
        InputError: when it is over.
    """
    end = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < end:
        yield
    raise _busy(str(where))


def _busy(where: str) -> InputError:
    what = f"another run has been releasing by this ledger for {LOCK_SECONDS:g} s"
    return InputError(what, where, "wait for it to end or stop it, then run again")


def _is_truncated(line: bytes) -> bool:
    """Tell whether a last line without a newline is incomplete.

    A complete JSON object is kept: if only its newline was damaged, dropping the line would undercount releases.
    """
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace"))
    except ValueError:
        return True
    return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
