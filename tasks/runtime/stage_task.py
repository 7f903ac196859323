"""Stages as Prefect tasks: their cache keys, the Parquets that they write, and the context that they run in.

Stage functions import torch, transformers, scikit-learn, and modules that use them, inside their bodies. These
libraries take seconds to import, and a run whose stages are all cached needs none of them: Prefect then calls no
stage function. `tests/flows/test_imports.py` checks that importing the flow does not import them.
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

from gradmm.config.settings import DataSettings, Settings
from gradmm.lm.model_reference import ModelReference
from gradmm.privacy.ledger import Budget
from gradmm.storage.artifacts import Root, StageArtifact
from gradmm.storage.location import Location, read_bytes
from gradmm.storage.redaction import redact_errors
from gradmm.tasks.runtime.registry import STAGE_VERSIONS

logger = logging.getLogger("gradmm.stage")

#: A stage's rows and figures (JSON values).
Outcome = tuple[pd.DataFrame | pa.Table, dict[str, Any]]

#: Parameter of a stage function that publishes its result itself, by a `Publication`.
PUBLICATION = "publication"


class RunContext(BaseModel, frozen=True):
    """Data source, resources and bookkeeping of a run.

    Not part of cache keys. Data enter keys by the digests in `SplitReference`s, so their location does not matter.

    Attributes:
        recipe: the recipe's name.
        labels: labels of the classes, in the recipe's order.
        seed: selects the rows held out for validation and those kept by `data.max_per_class`.
        threads: torch's threads in every process of the run. None: torch's default.
        force: stages to run again even if cached.
        budget: of all releases from this data, unless their owner has set another. None: no private run.
        ledger: name of the ledger that counts these releases.
        unit_column: column of the data that names each row's unit of privacy. None: each row is a unit.
        redraw: draw and charge a private target even if there is one from the same data and settings.
        key: cache key of the call that receives this context; see `for_stage`.
    """

    root: Root
    recipe: str
    data: DataSettings
    labels: tuple[int, ...]
    seed: int
    device: str
    threads: int | None = None
    force: tuple[str, ...] = ()
    budget: Budget | None = None
    ledger: str = ""
    unit_column: str | None = None
    redraw: bool = False
    key: str = ""

    def for_stage(self, stage: str, inputs: Mapping[str, Any]) -> RunContext:
        """Return the context for one call of a stage. The call's cache key is computed only here."""
        return self.model_copy(update={"key": stage_key(stage, inputs)})


@dataclasses.dataclass(frozen=True)
class Publication:
    """Destination of a stage's result, and the record to write with it. Not part of cache keys."""

    root: Root
    stage: str
    key: str
    record: Mapping[str, Any]

    def found(self) -> StageArtifact | None:
        """Return the result of an earlier run if it exists, even if Prefect has no record of it."""
        return self.root.find_stage(self.stage, self.key)

    def found_intact(self) -> StageArtifact | None:
        """Find the stage's Parquet as `found` does, unless Prefect remembers it with another digest."""
        made = self.found()
        try:
            remembered = read_bytes(self.root.results / self.stage / self.key)
        except (FileNotFoundError, NotADirectoryError):
            return made
        return made if made is not None and made.sha256.encode() in remembered else None

    @property
    def unfinished(self) -> Location:
        """The file for the stage's checkpoint, from which it resumes if killed. The stage deletes it."""
        return self.root.path / "unfinished" / f"{self.stage}-{self.key}"

    def publish(self, rows: pd.DataFrame | pa.Table, figures: dict[str, Any]) -> StageArtifact:
        """Write the stage's Parquet."""
        return self.root.write_stage(self.stage, self.key, rows, figures, dict(self.record))


class SplitReference(BaseModel, frozen=True):
    """One split of the data set, or a sample of it, by the digest of its content.

    Attributes:
        rows: number of rows.
        drawn: for a sample, its number of rows and its seed; see `drawn_rows`.
    """

    split: str
    digest: str
    rows: int
    drawn: tuple[int, int] | None = None


#: Former names of inputs, kept in cache keys: a private target with a new key would be another release.
KEY_NAMES = {"prompt_template": "wording"}


def stage_key(stage: str, inputs: Mapping[str, Any]) -> str:
    """Return the digest of all that determines a stage's result: its version, settings and upstream digests.

    Raises:
        TypeError: for an input of a type without a stable digest.
    """
    parts = {"stage": stage, "version": STAGE_VERSIONS[stage]} | _key_parts(inputs)
    canonical = json.dumps(parts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _key_parts(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        KEY_NAMES.get(name, name): _key_part(value)
        for name, value in inputs.items()
        if not isinstance(value, RunContext)
    }


def _key_part(value: Any) -> Any:
    if isinstance(value, StageArtifact):
        return value.sha256
    if isinstance(value, SplitReference):
        return value.digest
    if isinstance(value, ModelReference):
        return value.key
    if isinstance(value, Settings):
        return _key_part(value.key_fields())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [_key_part(item) for item in value]
    if isinstance(value, dict):
        return _key_mapping({str(name): _key_part(item) for name, item in value.items()})
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be part of a cache key")


def _key_mapping(parts: dict[str, Any]) -> Any:
    """Return a mapping by class label as a list of pairs if its labels are not in ascending order.

    The order of classes affects results, and `stage_key` sorts the keys of mappings.
    """
    if all(name.isdecimal() for name in parts):
        labels = [int(name) for name in parts]
        if labels != sorted(labels):
            return [[name, part] for name, part in parts.items()]
    return parts


class StageCache(CachePolicy):
    """Names Prefect's records `<stage>/<key>`, so that deleting results/<stage>/ clears one stage's cache."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        return f"{self.stage}/{inputs['context'].key}"


def stage_task(stage: str) -> Callable[[Callable[..., Outcome | StageArtifact]], Task[..., StageArtifact]]:
    """Turn a function that returns a stage's rows and figures into a Prefect task.

    The task writes them as the stage's Parquet and returns a reference to it. The function's first parameter is
    the `RunContext`; all others determine the result. A function with a parameter `publication` writes its Parquet
    itself and returns the reference. Errors of a function that receives a split are redacted.
    """

    def decorate(function: Callable[..., Outcome | StageArtifact]) -> Task[..., StageArtifact]:
        declared = inspect.signature(function)
        signature = declared.replace(parameters=[p for p in declared.parameters.values() if p.name != PUBLICATION])
        publishes_itself = PUBLICATION in declared.parameters

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> StageArtifact:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            inputs = dict(bound.arguments)
            context: RunContext = inputs["context"]
            if not context.key:
                raise ValueError(
                    f"{stage} was called without a cache key: pass `context.for_stage('{stage}', inputs)`"
                )
            publication = Publication(context.root, stage, context.key, _record(stage, inputs))
            logger.info("%s starts", stage)

            def publish() -> StageArtifact:
                if publishes_itself:
                    return function(**inputs, publication=publication)  # pyright: ignore[reportReturnType]
                return publication.publish(*function(**inputs))  # pyright: ignore[reportArgumentType, reportCallIssue]

            reads_records = any(isinstance(value, SplitReference) for value in inputs.values())
            return redact_errors(publish, stage, context.root.errors) if reads_records else publish()

        # Prefect binds arguments by this signature.
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
    """Return the record in a stage's Parquet: version of the code, upstream digests and settings."""
    upstream = {name: value for name, value in inputs.items() if _is_upstream(value)}
    settings = {name: value for name, value in inputs.items() if name not in upstream}
    return {
        "code": f"gradmm {version('gradmm')}, {stage} {STAGE_VERSIONS[stage]}",
        "upstream": _key_parts(upstream),
        "settings": _key_parts(settings),
    }


def _is_upstream(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_upstream, value))
    return isinstance(value, StageArtifact | SplitReference | ModelReference)
