"""Recognise data that share records, or units of privacy, with data from which this root released before.

    <root>/ledger/rows.key              a random key
    <root>/ledger/<data>.rows           digests of the records and units that were counted in this ledger
    <root>/ledger/<data>.rows/<digest>  the same in an object store: one object for each addition

Data may be known by several names: a folder that was moved, copied or linked, or a hub id spelled differently. A
digest is a keyed hash of a text or of a unit's name, and says nothing without the key. Whoever has both can test
whether a text or a name that they know is among them. All are private, files readable by their owner only.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from gradmm.data.splits import keyed_hashes
from gradmm.errors import InputError
from gradmm.storage.artifacts import make_private, publish
from gradmm.storage.atomic import temporary_file
from gradmm.storage.location import Location, create, objects_in, put, read_bytes

DIGEST_BYTES = 8
KEY_BYTES = 32

NO_DIGESTS = np.empty(0, np.uint64)


@dataclass(frozen=True)
class RowDigests:
    """The digests of a root's ledgers, in its folder `ledger`."""

    folder: Location

    def of(self, texts: Sequence[str], units: Iterable[str] = ()) -> UInt64[np.ndarray, " different"]:
        """Compute the digests of texts and of units' names with this root's key, sorted, each once.

        A text has two, one of them without regard to case, white space and the forms of Unicode, so that a copy
        that was exported otherwise is recognised too.

        Raises:
            InputError: if the key is missing, but not the digests that were made with it.
        """
        key = self._key()
        named = (f"unit\0{name}" for name in units)
        return np.unique(
            np.concatenate(
                [keyed_hashes(words, key) for words in (texts, (_normalised(text) for text in texts), named)]
            )
        )

    def add(self, ledger: str, digests: UInt64[np.ndarray, " different"]) -> None:
        """Count data in a ledger, besides those that are already. Needs the ledger's lock, if there is one."""
        known, file = self.read(ledger), self._file(ledger)
        new = np.setdiff1d(digests, known, assume_unique=True)
        if not len(new):
            return
        if isinstance(file, Path):
            publish(file, _to_bytes(np.union1d(known, new)))
        else:
            content = _to_bytes(new)
            put(file / hashlib.sha256(content).hexdigest()[:32], content)

    def read(self, ledger: str) -> UInt64[np.ndarray, " different"]:
        """Read the digests of all data that are counted in a ledger; empty if there are none.

        Raises:
            InputError: if the file is damaged.
        """
        parts = []
        for file in self._parts(ledger):
            content = read_bytes(file)
            if len(content) % DIGEST_BYTES:
                raise InputError("is damaged", str(file), "restore it from a backup; nothing was released")
            parts.append(np.frombuffer(content, dtype="<u8"))
        return np.unique(np.concatenate([NO_DIGESTS, *parts]).astype(np.uint64))

    def related(self, ledger: str, uncounted: UInt64[np.ndarray, " different"] = NO_DIGESTS) -> list[str]:
        """Return the names of the other ledgers that share a record or a unit with this one.

        Args:
            uncounted: digests of data that are taken for counted in it.
        """
        own = np.union1d(self.read(ledger), uncounted)
        others = (other for other in self.ledgers() if other != ledger)
        return [other for other in others if len(np.intersect1d(own, self.read(other), assume_unique=True))]

    def ledgers(self) -> list[str]:
        """Return the names of all ledgers with digests."""
        if isinstance(self.folder, Path):
            names = [file.name for file in self.folder.glob("*.rows")]
        else:
            names = [name.rpartition("/")[2] for name in objects_in(self.folder)]
        return sorted(name.removesuffix(".rows") for name in names if name.endswith(".rows"))

    def _parts(self, ledger: str) -> list[Location]:
        file = self._file(ledger)
        if isinstance(file, Path):
            return [file] if file.exists() else []
        return [file / name.rpartition("/")[2] for name in objects_in(file)]

    def _file(self, ledger: str) -> Location:
        return self.folder / f"{ledger}.rows"

    def _key(self) -> bytes:
        """Read the root's key, or make it. Of several runs that make one, all use the first."""
        file = self.folder / "rows.key"
        try:
            return read_bytes(file)
        except FileNotFoundError as error:
            if self.ledgers():
                fix = "restore it from a backup: without it, records cannot be recognised; nothing was released"
                raise InputError("is missing", str(file), fix) from error
            key = secrets.token_bytes(KEY_BYTES)
        with suppress(FileExistsError):
            if isinstance(file, Path):
                make_private(file.parent)
                with temporary_file(file) as (stream, temporary):
                    stream.write(key)
                    stream.flush()
                    os.link(temporary, file)
                temporary.unlink()
            else:
                create(file, key)
        return read_bytes(file)


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _to_bytes(digests: UInt64[np.ndarray, " different"]) -> bytes:
    return digests.astype("<u8").tobytes()
