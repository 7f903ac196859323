"""The unit tier does without Prefect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def without_prefect(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a session of unit tests alone in which Prefect was imported."""
    yield
    if all(item.path.is_relative_to(HERE) for item in request.session.items):
        assert "prefect" not in sys.modules
