"""Support for runs of a Prefect deployment: parameters, root, tags, logging, and shutdown with the server."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import get_client
from prefect.runtime import deployment, flow_run
from pydantic import BaseModel

from gradmm.config.loading import merged_settings
from gradmm.config.recipe import Recipe
from gradmm.errors import InputError
from gradmm.storage.location import Location

#: Environment variable with the process of `gradmm serve`, for the runs that it starts.
SERVED_BY = "GRADMM_SERVED_BY"

#: Seconds between two looks at the process of `gradmm serve`.
WATCH_SECONDS = 2.0


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


def check_root(root: Location) -> None:
    """Check that the root outlives a run of a deployment.

    Raises:
        InputError: for a relative folder. A work pool deletes the working directory of a run after it, and the
            ledger with it.
    """
    if deployment.id is not None and isinstance(root, Path) and not root.is_absolute():
        what = (
            f"{str(root)!r} is relative to the run's working directory, which a work pool deletes with the ledger"
        )
        raise InputError(what, "root", "give an absolute folder, or a URL such as s3://bucket/prefix")


def tags(recipe: Recipe) -> list[str]:
    """Return the tags of a recipe's deployment and of its runs."""
    return ["gradmm", "private" if recipe.privacy.epsilon else "no-guarantee"]


def tag_run(recipe: Recipe) -> None:
    """Tag this run of a deployment by its own recipe, whose epsilon may differ from the deployment's."""
    if deployment.id is None:
        return
    kept = [tag for tag in flow_run.tags if tag not in ("private", "no-guarantee")]
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=list(dict.fromkeys([*kept, *tags(recipe)])))


def shorten_refusals() -> None:
    """Log a refusal, which says what to do, without a traceback, which looks like a bug."""
    for name in ("prefect.task_runs", "prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], InputError):
        record.exc_info = None
    return True


def end_with_server() -> None:
    """End this process soon after the `gradmm serve` that started it, even if that is killed.

    A restarted server takes the runs of a killed one for dead, and may start others beside them.
    """
    if server := os.environ.get(SERVED_BY):
        threading.Thread(target=_end_after, args=(int(server),), daemon=True).start()


def _end_after(process: int) -> None:
    while True:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(WATCH_SECONDS)
