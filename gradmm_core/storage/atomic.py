"""Atomic creation of files and folders: write under a temporary name beside the destination, then rename.

The writer holds a lock (flock) on the temporary file until then. The system releases a lock when its process ends,
so an unlocked temporary file belongs to a killed process, and `sweep` removes it. On file systems without locks,
`sweep` removes nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".tmp"

#: `.<name of the destination>.<random>.tmp`
NAME = re.compile(r"\..+\.[a-z0-9_]{8}" + re.escape(SUFFIX))


@contextmanager
def temporary_file(place: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Create a file beside `place`, readable by its owner only, for the caller to rename. An error removes it."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=SUFFIX)
        if _lock(descriptor):
            break
        os.close(descriptor)  # swept before it was locked
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream, Path(name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """Create a folder beside `place`, and remove it on exit unless renamed."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.", suffix=SUFFIX))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(descriptor):
            break
        os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes, recursively. Keep those that are locked."""
    for parent, folders, files in os.walk(folder):
        for name in filter(NAME.fullmatch, [*folders, *files]):
            with suppress(OSError):  # locked, already renamed, or owned by another user
                _remove_unless_locked(Path(parent, name))
        folders[:] = [name for name in folders if not NAME.fullmatch(name)]


def _lock(descriptor: int) -> bool:
    """Take the lock; return False if the file was removed meanwhile."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def _remove_unless_locked(path: Path) -> None:
    is_folder = path.is_dir() and not path.is_symlink()
    descriptor = os.open(path, os.O_NOFOLLOW | (os.O_RDONLY if is_folder else os.O_RDWR))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path) if is_folder else path.unlink()
    finally:
        os.close(descriptor)
