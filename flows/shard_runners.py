"""Where a stage's shards run: in the flow's own process, or on the workers of one of Prefect's task runners.

Wherever a shard runs it is the same task with the same cache key, so that what a worker finished before it died is
found again, and a run may go on with another runner than it was begun with.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from prefect import Task, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture, as_completed
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner

from gradmm_core.artifacts import StageArtifact
from gradmm_core.errors import InputError
from gradmm_core.settings import ExecutionSettings
from tasks.stage import RunContext

logger = logging.getLogger("gradmm_core.flow")

#: How often shards whose workers died are given to others.
ATTEMPTS = 5


def run_shards(
    stage: Task[..., StageArtifact],
    context: RunContext,
    inputs: Sequence[Mapping[str, Any]],
    settings: ExecutionSettings,
) -> Generator[tuple[int, State[StageArtifact]]]:
    """Runs a stage on each of `inputs`; yields its number and the state that it ended in, in the order of ending.

    To be closed by a caller who stops early: it then ends its workers.

    Raises:
        RuntimeError: if shards were lost with their workers again and again.
    """
    if settings.runner == "in-process":
        for number, each in enumerate(inputs):
            yield number, stage(context, return_state=True, **each)  # pyright: ignore[reportReturnType]
        return
    import torch  # late, see tasks/stage.py

    # Ray and Dask would give each worker one thread, and with it other last bits.
    context = context.model_copy(update={"threads": context.threads or torch.get_num_threads()})
    left = dict(enumerate(inputs))
    for _ in range(ATTEMPTS):
        with (
            _one_server(),
            task_runner(settings) as runner,
            _one_gpu(settings, context.device),
            _no_waiting_on_errors(),
        ):
            numbers = {runner.submit(stage, {"context": context, **each}): number for number, each in left.items()}
            for future in as_completed(list(numbers)):
                state = _final_state(future)
                if state:
                    del left[numbers[future]]
                    yield numbers[future], state
        if not left:
            return
        logger.warning("%s: %d shards were lost with their workers, and are run again", stage.name, len(left))
    raise RuntimeError(f"{stage.name}: {len(left)} shards were lost with their workers {ATTEMPTS} times over")


def task_runner(settings: ExecutionSettings) -> TaskRunner[Any]:
    """Prefect's runner for the setting.

    Raises:
        InputError: if it is not installed.
    """
    if settings.runner == "processes":
        import torch

        workers = settings.workers or max(1, torch.cuda.device_count())
        taken = multiprocessing.get_context("spawn").Value("i", 0)
        return ProcessPoolTaskRunner(max_workers=workers, initializer=_take_gpu, initargs=(taken,))
    local: dict[str, Any]
    try:
        if settings.runner == "ray":
            from prefect_ray.task_runners import RayTaskRunner

            local = {"num_cpus": settings.workers, "include_dashboard": False}
            return RayTaskRunner(settings.address, init_kwargs=None if settings.address else local)
        from prefect_dask.task_runners import DaskTaskRunner

        # One thread each: a worker's threads are torch's.
        local = {"n_workers": settings.workers, "threads_per_worker": 1, "dashboard_address": None}
        return DaskTaskRunner(address=settings.address, cluster_kwargs=None if settings.address else local)
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed",
            f"execution.runner={settings.runner}",
            f"pip install 'gradmm[{settings.runner}]'",
        ) from error


def _take_gpu(taken: Any) -> None:
    """In a new process of the pool: makes the next GPU the one that "cuda" means."""
    import torch

    if torch.cuda.is_available():
        with taken.get_lock():
            torch.cuda.set_device(taken.value % torch.cuda.device_count())
            taken.value += 1


def _one_gpu(settings: ExecutionSettings, device: str) -> AbstractContextManager[Any]:
    """Ray gives a task no GPU unless told that it needs one."""
    import torch

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if settings.runner != "ray" or not on_gpu:
        return nullcontext()
    from prefect_ray.context import remote_options

    return remote_options(num_gpus=1)


@contextmanager
def _one_server() -> Iterator[None]:
    """Lets workers on this machine report to the server that the flow has, where that is one of its own."""
    with get_client(sync_client=True) as client:
        api = str(client.api_url)
    with temporary_settings({PREFECT_API_URL: api}):
        yield


@contextmanager
def _no_waiting_on_errors() -> Iterator[None]:
    """A pool waits for its processes' tasks, minutes long, even if its flow was cancelled, stopped, or failed."""
    others = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise


def _final_state(future: PrefectFuture[StageArtifact]) -> State[StageArtifact] | None:
    """None if its worker died."""
    try:
        future.wait()
        state = future.state
    except (ObjectNotFound, OSError, RuntimeError):  # a broken pool is a RuntimeError
        return None
    return state if state.is_final() and not state.is_crashed() else None
