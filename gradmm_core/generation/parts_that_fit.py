"""Division of work that does not fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def in_parts_that_fit(work: Callable[[range], Result], numbers: range) -> list[Result]:
    """Call `work(numbers)`. If memory runs out, call it on each half instead, recursively.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: if memory runs out for a single number.
    """
    try:
        return [work(numbers)]
    except (RuntimeError, MemoryError) as error:
        if len(numbers) == 1 or not _is_out_of_memory(error):
            raise
    # Outside the handler, because the exception keeps the attempt's allocations alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = (len(numbers) + 1) // 2
    logger.warning("%d examples do not fit into memory; continuing with %d", len(numbers), half)
    return [*in_parts_that_fit(work, numbers[:half]), *in_parts_that_fit(work, numbers[half:])]


def _is_out_of_memory(error: BaseException) -> bool:
    """Recognise the CPU allocator by its message, because it raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
