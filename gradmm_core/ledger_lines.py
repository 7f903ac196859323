"""Where a ledger keeps its lines: in one file under a lock, or on an object store as one object each.

A line is added only if none was added since its writer last read. A file's lock sees to that beforehand. On an
object store there is no lock to hold: line n is created on the condition that no line n is there, and whoever
comes second is told so, reads again and decides again. So no line is ever lost, and none rests on others than
those its writer has seen.
"""

from __future__ import annotations

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

from gradmm_core.errors import InputError
from gradmm_core.location import create, objects_in, storage_errors

#: How long to wait for other runs that are releasing from the same data.
LOCK_SECONDS = 600.0


@dataclass(frozen=True)
class LinesOfFile:
    """One line after the other in a file; beside it its .lock."""

    file: Path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other threads, processes and machines out. The holder may take it again.

        Raises:
            InputError: if it cannot be had.
        """
        # While it is held, one object for all ledgers of the file: that is what a thread can take again. It is not
        # kept for longer, as a forked process has to make its own.
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

    def read(self) -> list[bytes]:
        """All lines, without their newlines."""
        if not self.file.exists():
            return []  # asking leaves no trace
        with self.lock():
            return self._sound()[0]

    def append(self, line: bytes, after: int) -> bool:
        """Adds a line to the `after` that were read, and returns only once it is on disk. The lock is held."""
        _, content = self._sound()
        try:
            descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as stream:
                stream.truncate(len(content))
                stream.write((line if content[-1:] in (b"", b"\n") else b"\n" + line) + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            # A file is on disk only once its name is; its folder may be new too.
            _sync_folder(self.file.parent)
            _sync_folder(self.file.parent.parent)
        except OSError as error:
            raise self._unwritable(error) from error
        return True

    def _sound(self) -> tuple[list[bytes], bytes]:
        """The lines, and the bytes that hold them."""
        content = self.file.read_bytes() if self.file.exists() else b""
        *lines, tail = content.split(b"\n")
        if _breaks_off(tail):
            # The process died while writing it: its intent was not yet on disk, so no noise had been drawn.
            return lines, content.removesuffix(tail)
        return [*lines, tail], content

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"the privacy ledger cannot be written ({error.strerror})",
            str(self.file),
            "give it room and permission",
        )


@dataclass(frozen=True)
class LinesOfObjects:
    """Line n in the object `<folder>/<n, in 8 digits>.json`."""

    folder: UPath

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps nobody out."""
        yield

    def read(self) -> list[bytes]:
        """All lines.

        Raises:
            InputError: if one is missing before the last.
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
        """Adds a line to the `after` that were read, once it is stored. False if another was added since."""
        try:
            create(self.folder / f"{after + 1:08}.json", line)
        except FileExistsError:
            return False
        return True


def tries(where: Path | UPath) -> Iterator[None]:
    """Once more, for as long as one waits for other runs.

    Raises:
        InputError: after that.
    """
    end = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < end:
        yield
    raise _busy(str(where))


def _busy(where: str) -> InputError:
    what = f"another run has been releasing from the same data for {LOCK_SECONDS:g} s"
    return InputError(what, where, "wait for it or end it, then run again")


def _breaks_off(line: bytes) -> bool:
    """Whether a last line without its newline is only the beginning of one.

    A whole object is never dropped: were the newline a flipped bit, a release would go uncounted.
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
