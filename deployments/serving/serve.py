"""`gradmm serve`: recipes as deployments of a Prefect server, and a runner for them in this process.

A deployment has one run at a time. Further runs wait (ENQUEUE) instead of being dropped (CANCEL_NEW), so that data
that change during a run are noticed. A run without changes ends `Unchanged` within seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psutil

from gradmm.config.recipe import Recipe
from gradmm.deployments.recipe_files import FOLDER, recipe_names
from gradmm.deployments.serving.credentials import require_prefect_aws, use_aws_credentials
from gradmm.deployments.serving.local_run import HEARTBEAT_SECONDS
from gradmm.deployments.serving.prefect_server import Server, running_server
from gradmm.deployments.serving.recipe_deployment import (
    DATASET_CHANGED,
    dataset_resource,
    description,
    parameters,
)
from gradmm.errors import InputError, ServerGone
from gradmm.storage.artifacts import Root
from gradmm.storage.location import Location

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment
    from prefect.runner import Runner

#: Longer than it takes to notice that the server has ended.
LOST_SECONDS = 5

#: The time without a heartbeat after which a run counts as dead.
DEAD_AFTER_SECONDS = 100

CRASH_AUTOMATION = "gradmm: crash runs whose process died"

#: Environment variables of the processes of runs.
RUN_SETTINGS = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "gradmm",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
}


def serve(
    recipes: Mapping[str, Recipe],
    root: Location,
    cron: str | None,
    limit: int,
    port: int | None,
    aws_credentials: str | None = None,
) -> None:
    """Serve a deployment of each recipe until stopped.

    Args:
        cron: schedule of each recipe, in UTC.
        limit: concurrent runs of all recipes together.
        port: of the local server.
        aws_credentials: the block with the credentials of the root; None: AWS's environment variables have them.

    Raises:
        InputError: if the root cannot be used, `prefect-aws` is not installed, or there is no such block.
        ServerGone: if the server has ended; active runs are killed.
    """
    if cron is not None:
        _check_cron(cron)
    if aws_credentials is None:
        Root(path=root).prepare()
    else:
        require_prefect_aws()
    for name, value in RUN_SETTINGS.items():
        os.environ.setdefault(name, value)
    with running_server(port) as server:
        # The server starts during these imports, which take about as long.
        from prefect.runner import Runner

        from gradmm.flows.runtime.deployed import SERVED_BY

        os.environ[SERVED_BY] = str(os.getpid())
        deployments = [to_deployment(recipe, root, cron) for recipe in recipes.values()]
        server.wait()
        if aws_credentials is not None:
            use_aws_credentials(aws_credentials)
            Root(path=root).prepare()
        # It tells of a lost connection by a traceback.
        logging.getLogger("prefect.FlowRunCancellingObserver").setLevel(logging.ERROR)
        # It tells every two seconds of runs that wait for others.
        logging.getLogger("prefect.runner").addFilter(lambda record: "at capacity" not in record.getMessage())
        if server.process is None:
            refuse_served(recipes, server)
        runner = Runner(name="gradmm", query_seconds=2, limit=limit)
        ids: list[UUID] = [runner.add_deployment(each) for each in deployments]  # pyright: ignore
        keep_crash_automation()
        if server.process is not None:
            crash_runs_of_a_stopped_server(ids)
        print(_greeting(list(recipes), server), flush=True)
        # Not `asyncio.run`: without a server, its end of the runner takes long and prints tracebacks.
        loop = asyncio.new_event_loop()
        loop.run_until_complete(_run_until_stopped(runner, server))
        loop.close()
        print("gradmm: stopped; active runs are cancelled, and resume when run again")


def recipes_to_serve(
    names: Sequence[str], folder: Path | None, load: Callable[[str], Recipe]
) -> dict[str, Recipe]:
    """Load the recipes in `names`, by default all that come with gradmm, and those of a folder.

    A recipe of the folder replaces one of the same name.

    Raises:
        InputError: for a folder without recipes, or with two of the same name.
    """
    files = sorted(file for file in folder.glob("*.y*ml") if file.is_file()) if folder else []
    if folder and not files:
        raise InputError("has no recipe (.yaml)", f"recipes {folder}", "give a folder of recipes")
    named = _by_name(names or recipe_names(), load)
    return named | _by_name([str(file) for file in files], load)


def _by_name(files: Iterable[str], load: Callable[[str], Recipe]) -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for file in files:
        recipe = load(file)
        if recipe.name in recipes:
            raise InputError(f"another recipe is named {recipe.name!r}", file, "change its `name`")
        recipes[recipe.name] = recipe
    return recipes


def to_deployment(recipe: Recipe, root: Location, cron: str | None = None) -> RunnerDeployment:
    """Return the deployment of one recipe."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.events import DeploymentEventTrigger
    from prefect.types.entrypoint import EntrypointType

    from gradmm.flows.distil import distil
    from gradmm.flows.runtime.deployed import tags

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
        # The installed name: runs find it from any folder.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def refuse_served(names: Iterable[str], server: Server) -> None:
    """Refuse recipes whose deployments another `gradmm serve` has: it would run them into its root or this one's.

    Raises:
        InputError: with the other's root.
    """
    from prefect import get_client
    from prefect.client.schemas.objects import DeploymentStatus
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        for name in names:
            try:
                deployment = client.read_deployment_by_name(f"gradmm/{name}")
            except ObjectNotFound:
                continue
            if deployment.status == DeploymentStatus.READY and not deployment.paused:
                raise InputError(
                    f"gradmm/{name} is served already, with the root {deployment.parameters.get('root')}",
                    server.api,
                    "stop that `gradmm serve` (one that was killed counts for a minute), or rename the recipe",
                )


def keep_crash_automation() -> None:
    """Create or update the automation that crashes runs without a heartbeat.

    A run that was killed along with its runner stays `Running` on the server and blocks its deployment.
    """
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture

    values: dict[str, Any] = {
        "name": CRASH_AUTOMATION,
        "description": f"No heartbeat for {DEAD_AFTER_SECONDS} s. Start another run: it resumes this one.",
        "trigger": EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            # Any event of the run, its end too, whatever that state is named.
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
        existing: Automation = Automation.read(name=CRASH_AUTOMATION)  # pyright: ignore[reportAssignmentType]
    except ValueError:
        Automation(**values).create()
    else:
        # Only if it differs: an update discards the heartbeats seen so far.
        if any(getattr(existing, name) != value for name, value in values.items()):
            existing.model_copy(update=values).update()


def crash_runs_of_a_stopped_server(deployments: Iterable[UUID]) -> None:
    """Crash the runs that a restarted server still shows as `Running`: they were killed along with it."""
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
            message = "It and its server were killed. Start another run: it resumes this one."
            client.set_flow_run_state(run.id, Crashed(message=message))


async def _run_until_stopped(runner: Runner, server: Server) -> None:
    """Run until Ctrl-C or SIGTERM, then end the runs so that they do not stay `Running` on the server.

    Raises:
        ServerGone: if the server ends first. Prefect's runner would print tracebacks.
    """
    running = asyncio.create_task(runner.start())
    await asyncio.sleep(0)  # it sets a signal handler of its own, which is replaced below
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    asking, losing = asyncio.create_task(asked.wait()), asyncio.create_task(_lost(server))
    await asyncio.wait({running, asking, losing}, return_when=asyncio.FIRST_COMPLETED)
    if running.done() and not asked.is_set():  # has failed: perhaps the server has just ended
        await asyncio.wait({losing}, timeout=LOST_SECONDS)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)  # a second signal ends the process at once
    if losing.done() and not asked.is_set():
        for run in psutil.Process().children(recursive=True):
            run.kill()  # it could not report its end; the next run continues from its finished shards
        fix = "serve again; active runs were stopped, and resume when run again"
        raise ServerGone("the Prefect server stopped answering", server.api, fix)
    if not running.done():
        await runner.astop()
    for task in (asking, losing):
        task.cancel()
    await asyncio.gather(running, asking, losing, return_exceptions=True)
    await running


async def _lost(server: Server) -> None:
    """Wait until the server has ended. Prefect's runner gives up after some four seconds too."""
    refusals = 0
    while refusals < 2:
        await asyncio.sleep(1)
        refusals = refusals + 1 if await asyncio.to_thread(lambda: server.has_ended) else 0


def _check_cron(cron: str) -> None:
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    try:
        CronSchedule(cron=cron)
    except ValidationError as error:
        what = f"{cron!r} is not a cron schedule"
        raise InputError(what, "cron", "give five fields: '0 6 * * *' is 6:00 UTC each day") from error


def _greeting(names: Iterable[str], server: Server) -> str:
    first, *_ = served = list(names)
    lines = [f"Serving {', '.join(f'gradmm/{name}' for name in served)} at {server.ui} (Ctrl-C stops it)", "Next:"]
    if server.process is None:
        lines.insert(1, "This server was running already: when it stops, so does this command.")
    if not server.configured:
        lines.append(f"  export PREFECT_API_URL={server.api}")
    lines.append(f"  prefect deployment run gradmm/{first} --watch")
    lines.append(f"To share the work among machines, see {FOLDER / 'prefect.yaml'}")
    return "\n".join(lines)
