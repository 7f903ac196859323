"""`gradmm serve`: all recipes as deployments of a Prefect server, run by this process as they are asked for.

A deployment has one run at a time. Further runs wait (ENQUEUE) and are not dropped (CANCEL_NEW): data that change
during a run must not go unnoticed, and a run that waited for nothing ends `Unchanged` within seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from deployments.prefect_server import Server, running_server
from deployments.recipe_deployment import DATASET_CHANGED, dataset_resource, description, parameters, tags
from deployments.recipe_files import recipe_names
from gradmm_core.errors import InputError
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment
    from prefect.runner import Runner

#: Runs say so often that they are alive, and are taken for dead after so long without.
HEARTBEAT_SECONDS, DEAD_AFTER_SECONDS = 30, 100

CRASH_AUTOMATION = "gradmm: crash runs whose process died"

#: For the processes of runs.
RUN_SETTINGS = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "gradmm_core",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
}


def serve(recipes: Mapping[str, Recipe], root: Location, cron: str | None, limit: int, port: int | None) -> None:
    """Serves a deployment for each recipe until it is stopped.

    Args:
        cron: when each is to run by itself; in UTC.
        limit: how many runs there may be at once, of all recipes together.
        port: of the local server.
    """
    if cron is not None:
        _check_cron(cron)
    for name, value in RUN_SETTINGS.items():
        os.environ.setdefault(name, value)
    with running_server(port) as server:
        # While the server starts: these imports take about as long.
        from prefect.runner import Runner

        deployments = [to_deployment(recipe, root, cron) for recipe in recipes.values()]
        server.wait()
        runner = Runner(name="gradmm", query_seconds=2, limit=limit)
        ids: list[UUID] = [runner.add_deployment(each) for each in deployments]  # pyright: ignore
        keep_crash_automation()
        if server.process is not None:
            crash_runs_of_a_stopped_server(ids)
        print(_greeting(list(recipes), server), flush=True)
        asyncio.run(_run_until_stopped(runner))
        print("gradmm: stopped; runs that were going on are cancelled, and go on where they were when run again")


def recipes_to_serve(
    names: Sequence[str], folder: Path | None, load: Callable[[str], Recipe]
) -> dict[str, Recipe]:
    """Those named, or else all that come with gradmm; and those of a folder, which may take the place of ours.

    Raises:
        InputError: for a folder with no recipes, or with two of one name.
    """
    files = sorted(file for file in folder.glob("*.y*ml") if file.is_file()) if folder else []
    if folder and not files:
        raise InputError("no recipe (.yaml) is there", f"--recipes {folder}", "give a folder of recipes")
    of_users: dict[str, Recipe] = {}
    for file in files:
        recipe = load(str(file))
        if recipe.name in of_users:
            raise InputError(f"a second recipe is named {recipe.name!r}", str(file), "change its `name`")
        of_users[recipe.name] = recipe
    ours = [load(name) for name in names or recipe_names()]
    return {recipe.name: recipe for recipe in ours} | of_users


def to_deployment(recipe: Recipe, root: Location, cron: str | None = None) -> RunnerDeployment:
    """The deployment of one recipe."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.events import DeploymentEventTrigger
    from prefect.types.entrypoint import EntrypointType

    from flows.distil import distil

    return distil.to_deployment(  # pyright: ignore[reportReturnType]  (no coroutine outside of a loop)
        name=recipe.name,
        parameters=parameters(recipe, root),
        description=description(recipe),
        tags=tags(recipe),
        version=version("gradmm"),
        cron=cron,
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        triggers=[
            DeploymentEventTrigger(
                name=f"gradmm/{recipe.name}: its data changed",
                expect={DATASET_CHANGED},
                match={"prefect.resource.id": dataset_resource(recipe.name)},  # pyright: ignore[reportArgumentType]
            )
        ],
        # Found wherever gradmm is installed, from any folder.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def keep_crash_automation() -> None:
    """Ends runs that are `Running` on the server only: their process was killed along with its runner's.

    Until then they would also keep the next run of their deployment waiting.
    """
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture

    values: dict[str, Any] = {
        "name": CRASH_AUTOMATION,
        "description": f"No heartbeat for {DEAD_AFTER_SECONDS} s. Start another run: it goes on where it was.",
        "trigger": EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            # Any news of the run, its end too, whatever that state is named.
            expect={"prefect.flow-run.*"},
            match={"prefect.resource.id": "prefect.flow-run.*"},  # pyright: ignore[reportArgumentType]
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": "gradmm"},  # pyright: ignore
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=DEAD_AFTER_SECONDS),
        ),
        "actions": [
            ChangeFlowRunState(
                name="Crashed", state=StateType.CRASHED, message="Its process died: no heartbeat.", force=False
            )
        ],
    }
    try:
        there: Automation = Automation.read(name=CRASH_AUTOMATION)  # pyright: ignore[reportAssignmentType]
    except ValueError:
        Automation(**values).create()
    else:
        # An update would make it forget the heartbeats that it waits for.
        if any(getattr(there, name) != value for name, value in values.items()):
            there.model_copy(update=values).update()


def crash_runs_of_a_stopped_server(deployments: Iterable[UUID]) -> None:
    """Ends what a server that is just starting still has for `Running`: it had been killed along with the runs."""
    from prefect import get_client
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    alive = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=list(deployments))),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=alive))),
        ):
            message = "It and its server were killed. Start another run: it goes on where this one was."
            client.set_flow_run_state(run.id, Crashed(message=message))


async def _run_until_stopped(runner: Runner) -> None:
    """Returns after Ctrl-C or SIGTERM. The server is told of runs that ends: else they stayed `Running` there."""
    running = asyncio.create_task(runner.start())
    await asyncio.sleep(0)  # it sets a handler of its own, which is then replaced
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    asking = asyncio.create_task(asked.wait())
    await asyncio.wait({running, asking}, return_when=asyncio.FIRST_COMPLETED)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)  # who asks twice is in a hurry
    if not running.done():
        await runner.astop()
    asking.cancel()
    await running


def _check_cron(cron: str) -> None:
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    try:
        CronSchedule(cron=cron)
    except ValidationError as error:
        what = f"{cron!r} is not a cron schedule"
        raise InputError(what, "--cron", "five fields, for example '0 6 * * *' for 6:00 UTC each day") from error


def _greeting(names: Iterable[str], server: Server) -> str:
    first, *_ = served = list(names)
    lines = [f"Serving {', '.join(f'gradmm/{name}' for name in served)} at {server.ui} (Ctrl-C stops it)", "Next:"]
    if not server.configured:
        lines.append(f"  export PREFECT_API_URL={server.api}")
    lines.append(f"  prefect deployment run gradmm/{first} --watch")
    return "\n".join(lines)
