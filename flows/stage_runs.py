"""Running stages one after another, and keeping the record of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State
from prefect.results import ResultStorage

from flows.result_storage import result_storage
from flows.shard_runners import run_shards
from flows.stopping import stop_if_asked
from flows.ui_artifacts import UiArtifacts
from gradmm_core.artifacts import StageArtifact
from gradmm_core.errors import InputError
from gradmm_core.memory import peak_memory
from gradmm_core.run_record import StageRecord
from gradmm_core.settings import ExecutionSettings
from tasks.stage import RunContext, stage_key

logger = logging.getLogger("gradmm_core.flow")


@dataclass
class StageRuns:
    """Runs stages with the run's result storage, and shows each in Prefect's UI."""

    context: RunContext
    ui: UiArtifacts
    records: list[StageRecord] = field(default_factory=list)

    def run(self, stage: Task[..., StageArtifact], **inputs: Any) -> StageArtifact:
        """One stage: its artifact, made now or found in the cache."""
        with self._measured() as made:
            made.add(self._configured(stage)(self.context, return_state=True, **inputs))  # pyright: ignore
            self._check(stage, inputs, made.artifact)
        return made.artifact

    def run_sharded(
        self,
        shard: Task[..., StageArtifact],
        merge: Task[..., StageArtifact],
        inputs: Sequence[Mapping[str, Any]],
        execution: ExecutionSettings,
        further: Callable[[Sequence[StageArtifact]], Sequence[Mapping[str, Any]]] | None = None,
    ) -> StageArtifact:
        """A stage in shards, each cached by itself, and their merging: one line in the record.

        Args:
            further: from the shards, in order, the inputs of others that need them.
        """
        in_order: list[StageArtifact] = []
        with self._measured(children=execution.runner != "in-process") as made:
            while inputs:
                in_order += self._shards(shard, merge.name, inputs, execution, made)
                inputs, further = further(in_order) if further else (), None
            made.add(self._configured(merge)(self.context, return_state=True, shards=in_order))  # pyright: ignore
            self._check(merge, {"shards": in_order}, made.artifact)
        return made.artifact

    def _shards(
        self,
        shard: Task[..., StageArtifact],
        stage: str,
        inputs: Sequence[Mapping[str, Any]],
        execution: ExecutionSettings,
        made: _Made,
    ) -> list[StageArtifact]:
        """Side by side where there are workers; in the order of their inputs."""
        progress = self.ui.progress(stage, len(inputs))
        progress.tell()
        shards: dict[int, StageArtifact] = {}
        with closing(run_shards(self._configured(shard, stage), self.context, inputs, execution)) as states:
            for number, state in states:
                shards[number] = made.add(state)
                self._check(shard, inputs[number], shards[number])
                progress.add(shards[number].rows, cached=state.name == "Cached")
                progress.tell()
        return [shards[number] for number in sorted(shards)]

    def run_each(
        self,
        stage: Task[..., StageArtifact],
        inputs: Sequence[Mapping[str, Any]],
        execution: ExecutionSettings,
    ) -> list[StageArtifact]:
        """A stage with each of `inputs`, side by side where there are workers: the artifacts in that order.

        Each has a line of its own in the record, with the time since the last one had ended.
        """
        artifacts: dict[int, StageArtifact] = {}
        with closing(run_shards(self._configured(stage), self.context, inputs, execution)) as states:
            made = _Made()
            for number, state in states:
                artifacts[number] = made.add(state)
                self._check(stage, inputs[number], artifacts[number])
                self._keep(made)
                made = _Made()
        return [artifacts[number] for number in sorted(artifacts)]

    @cached_property
    def _results(self) -> ResultStorage:
        return result_storage(self.context.root)

    def _configured(self, stage: Task[..., StageArtifact], merge: str | None = None) -> Task[..., StageArtifact]:
        """The task; shards are run again with the stage that merges them."""
        again = not {stage.name, merge}.isdisjoint(self.context.force)
        return stage.with_options(result_storage=self._results, refresh_cache=again)

    def _check(self, stage: Task[..., StageArtifact], inputs: Mapping[str, Any], made: StageArtifact) -> None:
        """Proves that what Prefect remembered is this stage's, of these inputs.

        Raises:
            InputError: if files under results/ were exchanged.
        """
        key = stage_key(stage.name, inputs)
        if (made.stage, made.path.stem) != (stage.name, key):
            record = self.context.root.results / stage.name / key
            raise InputError("it is the record of another result", str(record), "delete it, then run again")

    @contextmanager
    def _measured(self, children: bool = False) -> Iterator[_Made]:
        """Keeps the record of what is made within; that of an error does not exist."""
        made = _Made()
        with peak_memory(children) as peak:
            yield made
        self._keep(made, {} if made.cached else {"peak_memory": peak.process, "peak_gpu_memory": peak.gpu})

    def _keep(self, made: _Made, peaks: Mapping[str, int | None] = MappingProxyType({})) -> None:
        seconds, artifact = made.seconds, made.artifact
        how = "cached" if made.cached else f"{seconds:.1f} s"
        logger.info("%s: %d rows, %s", artifact.stage, artifact.rows, how)
        self.records.append(StageRecord(cached=made.cached, seconds=seconds, **peaks, **artifact.model_dump()))
        self.ui.show_stage(self.records)


@dataclass
class _Made:
    """What the tasks of one stage came to. `artifact` is the last one's."""

    cached: bool = True
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def add(self, state: State[StageArtifact]) -> StageArtifact:
        """Raises whatever the task raised, and what was raised in it but lost."""
        stop_if_asked()
        self.artifact: StageArtifact = state.result()  # pyright: ignore[reportAttributeAccessIssue]
        self.cached &= state.name == "Cached"
        return self.artifact
