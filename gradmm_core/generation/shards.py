"""Divide a class's examples into shards, which are generated and stored independently."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Examples `start` to `start + count - 1` of one class. `index` numbers the class's shards."""

    label: int
    index: int
    start: int
    count: int


def plan_shards(labels: list[int], per_class: int, shard_size: int) -> list[Shard]:
    """Divide `per_class` examples of every class into shards of at most `shard_size`."""
    return [
        Shard(label, index, start, min(shard_size, per_class - start))
        for label in labels
        for index, start in enumerate(range(0, per_class, shard_size))
    ]
