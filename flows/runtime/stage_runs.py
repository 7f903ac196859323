"""Run the stages of a flow run one after another, and keep a record of each."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.results import ResultStorage

from gradmm.config.settings import ExecutionSettings
from gradmm.errors import InputError
from gradmm.evaluation.peak_memory import PeakMemory, peak_memory
from gradmm.flows.runtime.result_storage import result_storage
from gradmm.flows.runtime.shard_runners import run_shards
from gradmm.flows.runtime.stopping import raise_if_interrupted
from gradmm.flows.ui.artifacts import Progress, UiArtifacts
from gradmm.outputs.record import NEVER_CACHED, StageRecord
from gradmm.privacy.release_plan import ReleasePlan
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import RunContext

logger = logging.getLogger("gradmm.flow")


class _Result(NamedTuple):
    """Output of a stage, and whether it came from the cache: all of it, or in part."""

    artifact: StageArtifact
    cached: bool
    partly_cached: bool = False


@dataclass
class StageRuns:
    """Runs stages, records them, and shows them in Prefect's UI.

    Attributes:
        records: one per finished stage, in order.
    """

    context: RunContext
    plan: ReleasePlan
    ui: UiArtifacts
    records: list[StageRecord] = field(default_factory=list)

    def run(self, stage: Task[..., StageArtifact], **inputs: Any) -> StageArtifact:
        """Run one stage, or take its result from the cache."""
        started = time.perf_counter()
        with peak_memory() as peak:
            result = self._run_stage(stage, inputs)
        self._record(result, started, peak)
        return result.artifact

    def found(self, stage: Task[..., StageArtifact], **inputs: Any) -> StageArtifact | None:
        """Return the output of an earlier run of a stage with these inputs; None if there is none."""
        return self.context.root.find_stage(stage.name, self.context.for_stage(stage.name, inputs).key)

    def include(self, stage: Task[..., StageArtifact], **inputs: Any) -> None:
        """Keep a record of a stage's earlier result with these inputs, if there is one; compute nothing."""
        if artifact := self.found(stage, **inputs):
            self._record(_Result(artifact, cached=True), time.perf_counter())

    def run_sharded(
        self,
        shard: Task[..., StageArtifact],
        merge: Task[..., StageArtifact],
        inputs: Sequence[Mapping[str, Any]],
        execution: ExecutionSettings,
        second_round: Callable[[Sequence[StageArtifact]], Sequence[Mapping[str, Any]]] | None = None,
    ) -> StageArtifact:
        """Run a stage in shards, each cached by itself, and merge them. Keep one record of them all.

        Args:
            inputs: one mapping per shard.
            second_round: returns the inputs of further shards from the outputs of the first ones.
        """
        started = time.perf_counter()
        with peak_memory(children=execution.runner != "in-process") as peak:
            progress = self.ui.progress(merge.name)
            results = self._run_shards(shard, progress, inputs, execution)
            if second_round and (more := second_round(_artifacts(results))):
                results += self._run_shards(shard, progress, more, execution)
            results.append(self._run_stage(merge, {"shards": _artifacts(results)}))
        merged = results[-1].artifact
        cached = [result.cached for result in results]
        self._record(_Result(merged, all(cached), any(cached) and not all(cached)), started, peak)
        return merged

    def run_each(
        self,
        stage: Task[..., StageArtifact],
        inputs: Sequence[Mapping[str, Any]],
        execution: ExecutionSettings,
    ) -> list[StageArtifact]:
        """Run a stage once for each of `inputs`, on workers if there are any; return the outputs in that order.

        Keep a record of each. Its time starts when the previous one finishes.
        """
        results = {}
        started = time.perf_counter()
        with closing(self._run_calls(stage, inputs, execution)) as finished:
            for number, result in finished:
                self._record(result, started)
                results[number] = result
                started = time.perf_counter()
        return _artifacts(_in_order(results))

    def _run_shards(
        self,
        shard: Task[..., StageArtifact],
        progress: Progress,
        inputs: Sequence[Mapping[str, Any]],
        execution: ExecutionSettings,
    ) -> list[_Result]:
        """Run shards and show their progress; return the results in the order of `inputs`."""
        progress.expect(len(inputs))
        progress.tell()
        results = {}
        with closing(self._run_calls(shard, inputs, execution, progress.stage)) as finished:
            for number, result in finished:
                results[number] = result
                progress.add(result.artifact.rows, cached=result.cached)
                progress.tell()
        return _in_order(results)

    def _run_calls(
        self,
        stage: Task[..., StageArtifact],
        inputs: Sequence[Mapping[str, Any]],
        execution: ExecutionSettings,
        merge: str | None = None,
    ) -> Generator[tuple[int, _Result]]:
        """Run a stage with each of `inputs`; yield numbers and results as they finish.

        What workers would only read is read in this process: workers take seconds to start.

        Like `run_shards`, must be closed by a caller that stops early.
        """
        calls = [self._arguments(stage, call_inputs) for call_inputs in inputs]
        task = self._configured(stage, merge)
        there, missing = [], []
        may_be_there = execution.runner != "in-process" and not task.refresh_cache
        for number, call in enumerate(calls):
            (there if may_be_there and self._is_cached(stage, call["context"].key) else missing).append(number)
        for numbers, settings in ((there, ExecutionSettings()), (missing, execution)):
            with closing(run_shards(task, [calls[number] for number in numbers], settings)) as states:
                for index, state in states:
                    yield numbers[index], self._result(stage, calls[numbers[index]], state)

    def _is_cached(self, stage: Task[..., StageArtifact], key: str) -> bool:
        """Return whether both the Parquet and Prefect's record of it are there: without this, it is made again."""
        root = self.context.root
        return root.find_stage(stage.name, key) is not None and (root.results / stage.name / key).exists()

    def _run_stage(self, stage: Task[..., StageArtifact], inputs: Mapping[str, Any]) -> _Result:
        arguments = self._arguments(stage, inputs)
        state: State[StageArtifact] = self._configured(stage)(return_state=True, **arguments)  # pyright: ignore
        return self._result(stage, arguments, state)

    def _arguments(self, stage: Task[..., StageArtifact], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of one call: the inputs, and the context with their cache key.

        A stage that is never taken from the cache has a key of its own each time, so that it replaces no other
        run's result.
        """
        own = {"call": secrets.token_hex(8)} if stage.name in NEVER_CACHED else {}
        return {"context": self.context.for_stage(stage.name, {**inputs, **own}), **inputs}

    def _configured(self, stage: Task[..., StageArtifact], merge: str | None = None) -> Task[..., StageArtifact]:
        """Return the task with the run's result storage. Forcing `merge` also forces the shards that it merges."""
        forced = not {stage.name, merge}.isdisjoint((*self.context.force, *NEVER_CACHED))
        return stage.with_options(result_storage=self._storage, refresh_cache=forced)

    @cached_property
    def _storage(self) -> ResultStorage:
        return result_storage(self.context.root)

    def _result(self, stage: Task[..., StageArtifact], arguments: Mapping[str, Any], state: State) -> _Result:
        """Return the result of a finished call, or raise the task's error.

        Raises:
            KeyboardInterrupt: if the run was interrupted, even if the task suppressed it.
            InputError: if the record under results/ belongs to another stage or other inputs.
        """
        raise_if_interrupted()
        artifact: StageArtifact = state.result()  # pyright: ignore[reportAssignmentType]
        key = arguments["context"].key
        if (artifact.stage, artifact.path.stem) != (stage.name, key):
            file = self.context.root.results / stage.name / key
            raise InputError("it is the record of another result", str(file), "delete it, then run again")
        if artifact.path != self.context.root.stage_file(stage.name, key):
            artifact = self._copied(artifact, key)
        return _Result(artifact, cached=state.name == "Cached")

    def _copied(self, artifact: StageArtifact, key: str) -> StageArtifact:
        """Return this root's copy of a result, where Prefect's records were copied from another root.

        Raises:
            InputError: if this root has none.
        """
        root = self.context.root
        own = root.find_stage(artifact.stage, key)
        if own is None or own.sha256 != artifact.sha256:
            file, fix = (
                root.results / artifact.stage / key,
                f"delete {root.results}, or copy the folder stages too",
            )
            raise InputError(f"it is the record of another root's {artifact.path}", str(file), fix)
        return own

    def _record(self, result: _Result, started: float, peak: PeakMemory | None = None) -> None:
        """Log a finished stage, append its record and show it in the UI. A cached result has no peak memory."""
        artifact, cached, partly_cached = result
        seconds = time.perf_counter() - started
        logger.info("%s: %d rows, %s", artifact.stage, artifact.rows, "cached" if cached else f"{seconds:.1f} s")
        record = StageRecord(cached=cached, partly_cached=partly_cached, seconds=seconds, **artifact.model_dump())
        if peak and not cached:
            record = record.model_copy(update={"peak_memory": peak.process, "peak_gpu_memory": peak.gpu})
        self.records.append(record)
        self.ui.show_stage(self.records)


def _in_order(results: Mapping[int, _Result]) -> list[_Result]:
    return [results[number] for number in sorted(results)]


def _artifacts(results: Sequence[_Result]) -> list[StageArtifact]:
    return [result.artifact for result in results]
