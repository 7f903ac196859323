"""What all stages share: a cache key of digests, a Parquet with its own record, a Prefect task around both.

What a stage computes with is imported inside of its function: torch, scipy and scikit-learn take seconds, which a
run whose stages are all cached does not have to spend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import version
from typing import Any

import pandas as pd
import pyarrow as pa
from prefect import Task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from pydantic import BaseModel

from gradmm_core.artifacts import Root, StageArtifact
from gradmm_core.location import Location
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import DataSettings, Settings
from gradmm_core.withheld import without_messages
from tasks.stages import STAGES

logger = logging.getLogger("gradmm_core.stage")

#: Rows of a stage and its figures (JSON values).
Outcome = tuple[pd.DataFrame | pa.Table, dict[str, Any]]

#: The parameter by which a stage that publishes its result itself is given its `Publication`.
PUBLICATION = "publication"


class RunContext(BaseModel, frozen=True):
    """Where and on what a run works. Never part of a cache key: it does not decide what comes out."""

    root: Root
    recipe: str
    data: DataSettings
    labels: tuple[int, ...]
    seed: int
    device: str
    #: torch's, in every process that works for the run. None: as many as torch takes by itself.
    threads: int | None = None
    #: Stages to run again even if what they made is there.
    force: tuple[str, ...] = ()
    #: What all releases from this data together may spend (None: no private run), counted in which ledger.
    budget_epsilon: float | None = None
    ledger: str = ""


@dataclasses.dataclass(frozen=True)
class Publication:
    """Where a stage's result goes, for a stage that has to see to it itself. Never part of a cache key."""

    root: Root
    stage: str
    key: str
    record: Mapping[str, Any]

    def found(self) -> StageArtifact | None:
        """What an earlier run left there, though Prefect may not know of it."""
        return self.root.find_stage(self.stage, self.key)

    @property
    def unfinished(self) -> Location:
        """A file for what a stage would go on from if it were killed. It is the stage's to delete."""
        return self.root.path / "unfinished" / f"{self.stage}-{self.key}"

    def publish(self, rows: pd.DataFrame | pa.Table, figures: dict[str, Any]) -> StageArtifact:
        return self.root.write_stage(self.stage, self.key, rows, figures, dict(self.record))


class SplitReference(BaseModel, frozen=True):
    """One split of the data set, by the digest of its content.

    `drawn`: so many random rows of it in all, as evenly over the classes as it goes, and the seed that draws them.
    """

    split: str
    digest: str
    rows: int
    drawn: tuple[int, int] | None = None


def stage_key(stage: str, inputs: Mapping[str, Any]) -> str:
    """The digest of all that decides a stage's result: its version, its settings, its upstreams' digests.

    Raises:
        TypeError: for an input whose influence on the result cannot be told.
    """
    parts = {"stage": stage, "version": STAGES[stage].version} | _key_parts(inputs)
    canonical = json.dumps(parts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _key_parts(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _key_part(value) for name, value in inputs.items() if not isinstance(value, RunContext)}


def _key_part(value: Any) -> Any:
    if isinstance(value, StageArtifact):
        return value.sha256
    if isinstance(value, SplitReference):
        return value.digest
    if isinstance(value, ModelReference):
        return value.key
    if isinstance(value, Settings):
        return value.key_fields()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [_key_part(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _key_part(item) for name, item in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be part of a cache key")


class StageCache(CachePolicy):
    """Prefect's cache key of a stage: `<stage>/<key>`, so that deleting a folder forgets a stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        return f"{self.stage}/{stage_key(self.stage, inputs)}"


def stage_task(stage: str) -> Callable[[Callable[..., Outcome | StageArtifact]], Task[..., StageArtifact]]:
    """Makes a Prefect task of a function that returns a stage's rows and figures.

    The task writes them as the stage's Parquet and returns the small reference to it. The function's first
    parameter is the `RunContext`; all others decide the result. A function with a parameter `publication` writes
    its Parquet itself and returns the reference. Of one that is given a split, errors do not say what they quote.
    """

    def decorate(work: Callable[..., Outcome | StageArtifact]) -> Task[..., StageArtifact]:
        whole = inspect.signature(work)
        signature = whole.replace(parameters=[p for p in whole.parameters.values() if p.name != PUBLICATION])
        publishes_itself = PUBLICATION in whole.parameters

        @wraps(work)
        def run(*args: Any, **kwargs: Any) -> StageArtifact:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            inputs = dict(bound.arguments)
            context: RunContext = inputs["context"]
            place = Publication(context.root, stage, stage_key(stage, inputs), _record(stage, inputs))
            logger.info("%s starts", stage)

            def publish() -> StageArtifact:
                if publishes_itself:
                    return work(**inputs, publication=place)  # pyright: ignore[reportReturnType]
                return place.publish(*work(**inputs))  # pyright: ignore[reportArgumentType, reportCallIssue]

            reads_records = any(isinstance(value, SplitReference) for value in inputs.values())
            return without_messages(publish, stage, context.root.errors) if reads_records else publish()

        # What Prefect binds its arguments by.
        setattr(run, "__signature__", signature)  # noqa: B010  (the type checker knows no such attribute)
        return Task(
            run,
            name=stage,
            cache_policy=StageCache(stage),
            persist_result=True,
            result_serializer="json",
            cache_result_in_memory=False,
        )

    return decorate


def _record(stage: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage's Parquet says of its making."""
    upstream = {n: v for n, v in inputs.items() if _is_upstream(v)}
    settings = {n: v for n, v in inputs.items() if n not in upstream}
    return {
        "code": f"gradmm {version('gradmm')}, {stage} {STAGES[stage].version}",
        "upstream": _key_parts(upstream),
        "settings": _key_parts(settings),
    }


def _is_upstream(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_upstream, value))
    return isinstance(value, StageArtifact | SplitReference | ModelReference)
