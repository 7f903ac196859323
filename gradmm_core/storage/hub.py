"""Reading from the Hugging Face hub, or only from its local cache where the hub does not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

#: Timeout for the hub's answer, in seconds. HF_HUB_ETAG_TIMEOUT overrides it.
ANSWER_SECONDS = 6


@contextmanager
def hub_or_its_cache() -> Iterator[None]:
    """Let the hub's library read its local cache only, if the hub does not answer.

    The library tries each file six times: 23 s without a network, and a minute if packets are dropped.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or not _hub_answers(minute=int(time.monotonic() // 60))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


@lru_cache(maxsize=1)
def _hub_answers(minute: int) -> bool:
    """Ask the hub, at most once a minute: a process may live longer than an interruption of the network."""
    from huggingface_hub import constants, get_session

    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or ANSWER_SECONDS)
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)  # whatever the status
    except Exception:  # of an HTTP client that differs between the library's versions
        return False
    return True
