"""Parameters of a run of a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import get_client
from prefect.runtime import deployment
from pydantic import BaseModel

from gradmm.config.loading import merged_settings


def over_deployment(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a run's recipe blocks over those of its deployment; without a deployment, return them.

    Prefect replaces whole parameters: `-p generation='{"per_class": 9}'` alone would silently reset every other
    setting of `generation` to its default.
    """
    if deployment.id is None:
        return dict(blocks)
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment(deployment.id).parameters
    return merged_settings(
        {name: value for name, value in deployed.items() if name in blocks},
        {name: _without_defaults(value) for name, value in blocks.items()},
    )


def _without_defaults(value: Any) -> Any:
    """Return a parameter as plain values, without the defaults that its model filled in."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, list | tuple):
        return [_without_defaults(item) for item in value]
    return value
