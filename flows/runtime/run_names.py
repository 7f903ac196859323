"""Names of flow runs in Prefect's UI, in place of random ones."""

from __future__ import annotations

from datetime import UTC, datetime


def timed_name(what: str) -> str:
    """Add the time to a name: 'sst2 2026-11-24 14:05'. In UTC, as run ids are."""
    return f"{what} {datetime.now(UTC):%Y-%m-%d %H:%M}"
