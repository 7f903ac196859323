"""Running stages one after another, and keeping the record of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State

from flows.ui_artifacts import UiArtifacts
from gradmm_core.artifacts import StageArtifact
from gradmm_core.memory import peak_memory
from gradmm_core.run_record import StageRecord
from tasks.stage import RunContext

logger = logging.getLogger("gradmm_core.flow")


@dataclass
class StageRuns:
    """Runs stages with the run's result storage, and shows each in Prefect's UI."""

    context: RunContext
    ui: UiArtifacts
    records: list[StageRecord] = field(default_factory=list)

    def run(self, stage: Task[..., StageArtifact], **inputs: Any) -> StageArtifact:
        """One stage: its artifact, made now or found in the cache."""
        artifact, record = self._run(stage, inputs)
        self._keep(record)
        return artifact

    def run_sharded(
        self,
        shard: Task[..., StageArtifact],
        merge: Task[..., StageArtifact],
        inputs: Sequence[dict[str, Any]],
    ) -> StageArtifact:
        """A stage in shards, each cached by itself, and their merging: one line in the record."""
        progress = self.ui.progress(merge.name, len(inputs))
        shards: list[StageArtifact] = []
        parts: list[StageRecord] = []
        progress.tell(parts)
        for each in inputs:
            made, part = self._run(shard, each)
            shards.append(made)
            parts.append(part)
            progress.tell(parts)
        artifact, merged = self._run(merge, {"shards": shards})
        self._keep(
            merged.model_copy(
                update={
                    "cached": merged.cached and all(part.cached for part in parts),
                    "seconds": merged.seconds + sum(part.seconds for part in parts),
                    "peak_memory": _largest(part.peak_memory for part in parts),
                    "peak_gpu_memory": _largest(part.peak_gpu_memory for part in parts),
                }
            )
        )
        return artifact

    def _keep(self, record: StageRecord) -> None:
        self.records.append(record)
        self.ui.show_stage(self.records)

    def _run(self, stage: Task[..., StageArtifact], inputs: dict[str, Any]) -> tuple[StageArtifact, StageRecord]:
        started = time.perf_counter()
        configured = stage.with_options(
            result_storage=self.context.root.results, refresh_cache=stage.name in self.context.force
        )
        with peak_memory() as peak:
            state: State[StageArtifact] = configured(self.context, return_state=True, **inputs)  # pyright: ignore
            artifact = state.result()
        seconds = time.perf_counter() - started
        cached = state.name == "Cached"
        logger.info("%s: %d rows, %s", stage.name, artifact.rows, "cached" if cached else f"{seconds:.1f} s")
        peaks = {} if cached else {"peak_memory": peak.process, "peak_gpu_memory": peak.gpu}
        record = StageRecord(cached=cached, seconds=seconds, **peaks, **artifact.model_dump())
        return artifact, record


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
