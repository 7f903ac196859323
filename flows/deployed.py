"""What is different where a flow runs as a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import get_client
from prefect.runtime import deployment
from pydantic import BaseModel

from gradmm_core.recipe import merged_settings


def with_the_deployments(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's blocks as they were given to this run, over those of its deployment, if it has one.

    Prefect puts a run's parameters over the deployment's one by one: `-p generation='{"per_class": 9}'` alone
    would silently set everything else in `generation` back to the defaults of the code.
    """
    if deployment.id is None:
        return dict(blocks)
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment(deployment.id).parameters
    return merged_settings(
        {name: value for name, value in deployed.items() if name in blocks},
        {name: _given(value) for name, value in blocks.items()},
    )


def _given(value: Any) -> Any:
    """A parameter without what its model filled in."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, list | tuple):
        return [_given(item) for item in value]
    return value
