"""The record of one run, stored as run.json: the source of the terminal's summary, the report and the card."""

from __future__ import annotations

import io
import platform
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any

import pandas as pd
from pydantic import BaseModel

from gradmm.config.recipe import Recipe
from gradmm.privacy.guarantee import Guarantee
from gradmm.privacy.release_plan import ReleasePlan
from gradmm.storage.location import Location, read_bytes

LIBRARIES = ("gradmm", "prefect", "torch", "transformers", "datasets", "dp-accounting", "pyarrow", "numpy")

#: Stages whose rows have the columns `kept` and `reason`, in their order.
FILTERS = ("label_filter", "loss_selection", "category_balance")

#: Stages that every run makes anew: each private run audits the code that it runs.
NEVER_CACHED = ("mechanism_audit",)


class StageRecord(BaseModel, frozen=True):
    """One stage of a run.

    Attributes:
        figures: the stage's own figures, as JSON values.
        partly_cached: whether some of its shards were found in the cache, and `seconds` are those of the others.
        peak_memory, peak_gpu_memory: in bytes; None if unknown.
    """

    stage: str
    path: Location
    sha256: str
    rows: int
    figures: dict[str, Any]
    cached: bool
    seconds: float
    partly_cached: bool = False
    peak_memory: int | None = None
    peak_gpu_memory: int | None = None

    def read(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read the stage's rows, or some of their columns."""
        content = io.BytesIO(read_bytes(self.path))
        return pd.read_parquet(content, columns=None if columns is None else list(columns))

    @property
    def memory(self) -> str:
        """Peak memory of the process, and of the GPU if there is one: '1.2 GiB + GPU 3.4 GiB'."""
        peaks = [self.peak_memory, self.peak_gpu_memory]
        return " + GPU ".join(f"{peak / 2**30:.1f} GiB" for peak in peaks if peak is not None)


class RunRecord(BaseModel, frozen=True):
    """A completed run. Its figures are measured on private data and must not be published."""

    run_id: str
    recipe: Recipe
    plan: ReleasePlan
    guarantee: Guarantee
    data: dict[str, Any]
    model: dict[str, Any]
    started: datetime
    seconds: float
    versions: dict[str, str]
    stages: list[StageRecord]

    @property
    def unchanged(self) -> bool:
        """Whether all stages that may come from the cache did."""
        return all(stage.cached for stage in self.stages if stage.stage not in NEVER_CACHED)

    def stage(self, name: str) -> StageRecord:
        """Return the record of a stage."""
        return next(s for s in self.stages if s.stage == name)


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
