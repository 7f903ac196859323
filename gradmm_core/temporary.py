"""Files and folders on their way: made beside their place under a name of their own, then renamed into it.

Whoever makes one holds its lock (flock) until then. A lock ends with its process, however that ends: what nobody
holds was left by a process that was killed, and `sweep` removes it. Where a file system has no such locks, nothing
is swept.
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

#: `.<name of the place>.<random>.tmp`
NAME = re.compile(r"\..+\.[a-z0-9_]{8}" + re.escape(SUFFIX))


@contextmanager
def temporary_file(place: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file beside `place`, readable by its owner only; the caller renames it. An error removes it."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=SUFFIX)
        if _held(descriptor):
            break
        os.close(descriptor)  # swept in the very moment before it was held
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream, Path(name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """A new folder beside `place`; removed if it is still there in the end."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.", suffix=SUFFIX))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _held(descriptor):
            break
        os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Removes what killed processes have left anywhere in a folder. What a living one holds stays."""
    for parent, folders, files in os.walk(folder):
        for name in filter(NAME.fullmatch, [*folders, *files]):
            with suppress(OSError):  # held, renamed by now, or not ours
                _remove_unless_held(Path(parent, name))
        folders[:] = [name for name in folders if not NAME.fullmatch(name)]


def _held(descriptor: int) -> bool:
    """Takes the lock; False if what it would have been on is gone."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def _remove_unless_held(path: Path) -> None:
    is_folder = path.is_dir() and not path.is_symlink()
    descriptor = os.open(path, os.O_NOFOLLOW | (os.O_RDONLY if is_folder else os.O_RDWR))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path) if is_folder else path.unlink()
    finally:
        os.close(descriptor)
