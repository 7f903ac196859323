"""Recognise data that share records with data from which this root released before.

    <root>/ledger/rows.key        a random key
    <root>/ledger/<data>.rows     digests of the texts of all data that were counted in this ledger

Data may be known by several names: a folder that was moved, copied or linked, or a hub id spelled differently. A
digest is a keyed hash of a text, and says nothing without the key. Whoever has both can test whether a text that
they know is among the records. Both files are private, readable by their owner only.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from gradmm.data.splits import keyed_hashes
from gradmm.errors import InputError
from gradmm.storage.artifacts import make_private, publish
from gradmm.storage.atomic import temporary_file
from gradmm.storage.location import Location, create, read_bytes

DIGEST_BYTES = 8
KEY_BYTES = 32


@dataclass(frozen=True)
class RowDigests:
    """The digests of a root's ledgers, in its folder `ledger`."""

    folder: Location

    def of(self, texts: Sequence[str]) -> UInt64[np.ndarray, " different"]:
        """Compute the texts' digests with this root's key, sorted, each once."""
        return np.unique(keyed_hashes(texts, self._key()))

    def add(self, ledger: str, digests: UInt64[np.ndarray, " different"]) -> None:
        """Count data in a ledger, besides those that are already. Needs the ledger's lock."""
        known = self.read(ledger)
        every = np.union1d(known, digests)
        if len(every) > len(known):
            publish(self._file(ledger), every.astype("<u8").tobytes())

    def read(self, ledger: str) -> UInt64[np.ndarray, " different"]:
        """Read the digests of all data that are counted in a ledger; empty if there are none.

        Raises:
            InputError: if the file is damaged.
        """
        try:
            content = read_bytes(self._file(ledger))
        except FileNotFoundError:
            content = b""
        if len(content) % DIGEST_BYTES:
            raise InputError(
                "is damaged", str(self._file(ledger)), "restore it from a backup; nothing was released"
            )
        return np.frombuffer(content, dtype="<u8").astype(np.uint64)

    def related(self, ledger: str, others: Sequence[str]) -> list[str]:
        """Return those of the other ledgers that share a record with this one."""
        own = self.read(ledger)
        return [other for other in others if len(np.intersect1d(own, self.read(other), assume_unique=True))]

    def _file(self, ledger: str) -> Location:
        return self.folder / f"{ledger}.rows"

    def _key(self) -> bytes:
        """Read the root's key, or make it. Of several runs that make one, all use the first."""
        file = self.folder / "rows.key"
        try:
            return read_bytes(file)
        except FileNotFoundError:
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
