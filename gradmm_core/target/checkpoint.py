"""Checkpoint the unfinished sums of a target, so that a killed run resumes where it stopped.

The sums are noiseless sums of private records. Their file is readable by its owner only, and is deleted once the
target is published.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save

from gradmm.privacy.clipped_sum import ClippedSum, RecordSums
from gradmm.storage.artifacts import publish
from gradmm.storage.location import Location, read_bytes

SECONDS_BETWEEN_WRITES = 30.0

#: A class's sums, and the tensors of each.
PARTS = ("gradient", "class_sum", "second_moment", "token_sum")
DIGITS = ("high", "low")

#: The file starts with the SHA-256 of the rest, which is in the safetensors format.
DIGEST_BYTES = 32


@dataclass
class UnfinishedSums:
    """Sums by label in one file. The file's name must identify their inputs."""

    file: Location
    written: float = field(default_factory=lambda: time.monotonic())

    def read(self) -> dict[int, RecordSums]:
        """Read the sums of an earlier run by label; empty if there is no file, or a damaged or older one."""
        try:
            content = read_bytes(self.file)
        except FileNotFoundError:
            return {}
        digest, tensors = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(tensors).digest() != digest:
            return {}
        stored = load(tensors)
        sums = {}
        for label in dict.fromkeys(name.split()[0] for name in stored):
            records, ignored, *clipped = stored[f"{label} counts"].tolist()
            if len(clipped) != len(PARTS):  # written by a version with other parts
                return {}
            parts = {
                part: ClippedSum(*(stored[f"{label} {part} {digits}"] for digits in DIGITS), clipped=count)
                for part, count in zip(PARTS, clipped, strict=True)
            }
            sums[int(label)] = RecordSums(**parts, records=records, ignored=ignored)
        return sums

    def write(self, sums: Mapping[int, RecordSums]) -> None:
        """Write the sums, unless the last write was less than `SECONDS_BETWEEN_WRITES` ago."""
        if time.monotonic() - self.written < SECONDS_BETWEEN_WRITES:
            return
        tensors = {}
        for label, of_class in sums.items():
            parts: dict[str, ClippedSum] = {part: getattr(of_class, part) for part in PARTS}
            clipped = [part.clipped for part in parts.values()]
            tensors[f"{label} counts"] = torch.tensor([of_class.records, of_class.ignored, *clipped])
            tensors |= {
                f"{label} {name} {digits}": getattr(part, digits)
                for name, part in parts.items()
                for digits in DIGITS
            }
        content = save(tensors)
        publish(self.file, hashlib.sha256(content).digest() + content)
        self.written = time.monotonic()

    def delete(self) -> None:
        self.file.unlink(missing_ok=True)
