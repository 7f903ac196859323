"""The schedule of a fine-tuning."""

from __future__ import annotations

from typing import NamedTuple


class Schedule(NamedTuple):
    """Linear decay of the learning rate from its first value to zero over the steps of the whole training."""

    learning_rate: float
    steps: int
