"""The number of torch's threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Limit torch to `count` threads while the context is active."""
    import torch  # late: the demo's material does without it once it is complete

    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
