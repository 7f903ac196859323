"""The sums of a target in the making, on disk: a run that is killed after hours goes on where it was.

They are clean sums of private records, readable by their owner only, and deleted once the target is published.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from safetensors.torch import load, save

from gradmm_core.artifacts import publish
from gradmm_core.clipped_sum import ClippedSum, RecordSums
from gradmm_core.location import Location, read_bytes

SECONDS_BETWEEN_WRITES = 30.0

#: The sums that a class has.
PARTS = tuple(field.name for field in fields(RecordSums))

#: The file begins with the SHA-256 of the rest, safetensors.
DIGEST_BYTES = 32


@dataclass
class UnfinishedSums:
    """Sums by label in one file, whose name has to say what they are sums of."""

    file: Location
    written: float = field(default_factory=lambda: time.monotonic())

    def read(self) -> dict[int, RecordSums]:
        """What an earlier run left. Nothing, if there is none or it is damaged."""
        try:
            content = read_bytes(self.file)
        except FileNotFoundError:
            return {}
        digest, tensors = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(tensors).digest() != digest:
            return {}
        stored = load(tensors)
        labels = dict.fromkeys(name.split()[0] for name in stored)
        return {
            int(label): RecordSums(
                *(
                    ClippedSum(stored[f"{label} {part}"], *stored[f"{label} {part} counts"].tolist())
                    for part in PARTS
                )
            )
            for label in labels
        }

    def write(self, sums: Mapping[int, RecordSums]) -> None:
        """Every so often; else nothing is done."""
        if time.monotonic() - self.written < SECONDS_BETWEEN_WRITES:
            return
        tensors = {}
        for label, of_class in sums.items():
            for part in PARTS:
                each: ClippedSum = getattr(of_class, part)
                tensors[f"{label} {part}"] = each.total
                tensors[f"{label} {part} counts"] = torch.tensor([each.records, each.clipped])
        content = save(tensors)
        publish(self.file, hashlib.sha256(content).digest() + content)
        self.written = time.monotonic()

    def delete(self) -> None:
        self.file.unlink(missing_ok=True)
