"""`gradmm notify`: report that a recipe's data have changed, which runs its deployment."""

from __future__ import annotations

import logging

from gradmm.deployments.serving.prefect_server import answering_server
from gradmm.deployments.serving.recipe_deployment import DATASET_CHANGED, dataset_resource
from gradmm.errors import InputError


def notify(recipe: str) -> None:
    """Send the event that starts the recipe's deployment, and wait until the server has it.

    Raises:
        InputError: if no server answers, or if it has no such deployment.
    """
    if "/" in recipe:
        raise InputError("not the name of a recipe", recipe, "give the `name` in the file, without a path")
    with answering_server() as server:
        from prefect import get_client
        from prefect.events import emit_event
        from prefect.events.worker import EventsWorker
        from prefect.exceptions import ObjectNotFound

        with get_client(sync_client=True) as client:
            try:
                client.read_deployment_by_name(f"gradmm/{recipe}")
            except ObjectNotFound as error:
                fix = "serve it with `gradmm serve`, or see `prefect deployment ls`"
                raise InputError(f"no deployment gradmm/{recipe}", server.api, fix) from error
        emit_event(event=DATASET_CHANGED, resource={"prefect.resource.id": dataset_resource(recipe)})
        logging.getLogger("EventsWorker").setLevel(logging.ERROR)  # it warns of the event that is being sent
        EventsWorker.instance().drain()
