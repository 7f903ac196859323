"""The unit tier does without Prefect, and draws the same privacy noise each time."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gradmm.privacy import mechanism

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def without_prefect(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a session of unit tests alone in which Prefect was imported."""
    yield
    if all(item.path.is_relative_to(HERE) for item in request.session.items):
        assert "prefect" not in sys.modules


@pytest.fixture(autouse=True)
def repeatable_noise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test draw privacy noise from its own seed, so that none fails by chance now and then.

    The floating-point sampler alone: OpenDP's takes no seed.
    """
    seeded = np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
    monkeypatch.setattr(mechanism, "os", SimpleNamespace(urandom=seeded.bytes))
