"""Run a stage's shards in the flow's own process, or on the workers of one of Prefect's task runners.

A shard is the same task with the same cache key under every runner. Results that a worker finished before it died
are found again, and a run may resume with another runner.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from prefect import Task, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture, as_completed
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner

from gradmm.config.settings import ExecutionSettings
from gradmm.errors import InputError
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import RunContext

logger = logging.getLogger("gradmm.flow")

#: Rounds of submission, after which shards whose workers died are given up.
MAX_ATTEMPTS = 5

#: How long a cluster may take to accept a connection.
CONNECT_SECONDS = 10

#: Python's resource tracker, a process that gets these options when it starts, removes the semaphores of a stopped
#: run, and would warn of them in the terminal.
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"


def run_shards(
    stage: Task[..., StageArtifact],
    calls: Sequence[Mapping[str, Any]],
    settings: ExecutionSettings,
) -> Generator[tuple[int, State[StageArtifact]]]:
    """Run a stage with the arguments of each call; yield the call's number and final state as they finish.

    Must be closed by a caller that stops early: closing terminates the workers.

    Raises:
        InputError: if shards are lost with their workers `MAX_ATTEMPTS` times.
    """
    if settings.runner == "in-process":
        for number, arguments in enumerate(calls):
            yield number, stage(return_state=True, **arguments)  # pyright: ignore[reportReturnType]
        return
    if not calls:
        return
    import torch  # imported here: it takes seconds, and a run may find all its shards cached

    # Ray and Dask give each worker one thread by default, which would change the last bits of results.
    threads = torch.get_num_threads()
    pending = {
        number: {**arguments, "context": _with_threads(arguments["context"], threads)}
        for number, arguments in enumerate(calls)
    }
    device = calls[0]["context"].device
    for _ in range(MAX_ATTEMPTS):
        with (
            _workers_report_to_this_server(),
            _started(task_runner(settings)) as runner,
            _ray_gpu(settings, device),
            _workers_terminated_on_error(),
        ):
            with _children_without_ctrl_c():
                numbers = {runner.submit(stage, arguments): number for number, arguments in pending.items()}
            for future in as_completed(list(numbers)):
                state = _final_state(future)
                if state:
                    del pending[numbers[future]]
                    yield numbers[future], state
        if not pending:
            return
        logger.warning("%s: running %d shards again, lost with their workers", stage.name, len(pending))
    raise InputError(
        f"{len(pending)} shards were lost with their workers {MAX_ATTEMPTS} times",
        stage.name,
        "use fewer workers or smaller batches, if memory ran out (`gradmm check` shows what is needed)",
    )


def _with_threads(context: RunContext, threads: int) -> RunContext:
    return context.model_copy(update={"threads": context.threads or threads})


def task_runner(settings: ExecutionSettings) -> TaskRunner[Any]:
    """Return Prefect's task runner for `execution.runner`.

    Raises:
        InputError: if the runner's package is not installed.
    """
    if settings.runner == "processes":
        import torch

        workers = settings.workers or max(1, torch.cuda.device_count())
        if QUIET_TRACKER not in sys.warnoptions:
            sys.warnoptions.append(QUIET_TRACKER)
        assigned = multiprocessing.get_context("spawn").Value("i", 0)
        return ProcessPoolTaskRunner(max_workers=workers, initializer=_begin_worker, initargs=(assigned,))
    local: dict[str, Any]
    try:
        if settings.runner == "ray":
            from prefect_ray.task_runners import RayTaskRunner

            local = {"num_cpus": settings.workers, "include_dashboard": False}
            return RayTaskRunner(settings.address, init_kwargs=None if settings.address else local)
        from prefect_dask.task_runners import DaskTaskRunner

        # One task at a time per worker: torch's threads use the worker's cores.
        local = {"n_workers": settings.workers, "threads_per_worker": 1, "dashboard_address": None}
        return DaskTaskRunner(address=settings.address, cluster_kwargs=None if settings.address else local)
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed",
            f"execution.runner={settings.runner}",
            f"pip install 'gradmm[{settings.runner}]'",
        ) from error


def check_cluster(settings: ExecutionSettings) -> None:
    """Check that the runner's package is installed, and that something listens at the cluster's address.

    Raises:
        InputError: if not.
    """
    if settings.runner not in ("ray", "dask"):
        return
    task_runner(settings)
    if settings.address is None or settings.address == "auto":
        return
    try:
        address = urlsplit(settings.address if "://" in settings.address else f"tcp://{settings.address}")
        socket.create_connection((address.hostname or "", address.port or 0), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        problem = f"no cluster answers at {settings.address} ({error})"
        raise InputError(problem, "execution.address", "start the cluster, or correct the address") from error


def _begin_worker(assigned: Any) -> None:
    """Begin a process of the pool, which has to end with the run: a killed run's pool would wait for ever."""
    run = multiprocessing.parent_process()
    assert run is not None
    threading.Thread(target=lambda: (run.join(), os._exit(1)), daemon=True).start()
    _select_gpu(assigned)


def _select_gpu(assigned: Any) -> None:
    """Make "cuda" mean the next GPU in a new process of the pool.

    Args:
        assigned: shared count of processes that have selected a GPU.
    """
    import torch

    if torch.cuda.is_available():
        with assigned.get_lock():
            torch.cuda.set_device(assigned.value % torch.cuda.device_count())
            assigned.value += 1


def _ray_gpu(settings: ExecutionSettings, device: str) -> AbstractContextManager[Any]:
    """Request one GPU per task from Ray, which assigns none by default."""
    import torch

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if settings.runner != "ray" or not on_gpu:
        return nullcontext()
    from prefect_ray.context import remote_options

    return remote_options(num_gpus=1)


@contextmanager
def _started(runner: TaskRunner[Any]) -> Iterator[TaskRunner[Any]]:
    with ExitStack() as stack:
        with _children_without_ctrl_c():  # Ray and Dask start their processes here, a pool with its first tasks
            stack.enter_context(runner)
        yield runner


@contextmanager
def _children_without_ctrl_c() -> Iterator[None]:
    """Keep SIGINT from the processes that are started within, which inherit the mask.

    A terminal sends Ctrl-C to all of them. They would print tracebacks; the run terminates them anyway.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _workers_report_to_this_server() -> Iterator[None]:
    """Pass the server's address to workers on this machine: the flow may have started a server of its own."""
    with get_client(sync_client=True) as client:
        api = str(client.api_url)
    with temporary_settings({PREFECT_API_URL: api}):
        yield


@contextmanager
def _workers_terminated_on_error() -> Iterator[None]:
    """Terminate a pool's processes on any error: the pool would wait for their tasks, which take minutes."""
    children_before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - children_before:
            process.terminate()
        raise


def _final_state(future: PrefectFuture[StageArtifact]) -> State | None:
    """Wait for a shard and return its final state, or None if its worker died."""
    try:
        future.wait()
        state = future.state
    except (ObjectNotFound, OSError, RuntimeError):  # a broken pool is a RuntimeError
        return None
    return state if state.is_final() and not state.is_crashed() else None
