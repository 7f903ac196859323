"""What one run did: the content of run.json, from which the table, the report and the release are made."""

from __future__ import annotations

import io
import platform
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any

import pandas as pd
from pydantic import BaseModel

from gradmm_core.location import Location, read_bytes
from gradmm_core.privacy import Guarantee
from gradmm_core.recipe import Recipe

LIBRARIES = ("gradmm", "prefect", "torch", "transformers", "datasets", "dp-accounting", "pyarrow", "numpy")


class StageRecord(BaseModel, frozen=True):
    """One stage of a run. `figures` are the stage's own (JSON values); peaks are in bytes, None if not known."""

    stage: str
    path: Location
    sha256: str
    rows: int
    figures: dict[str, Any]
    cached: bool
    seconds: float
    peak_memory: int | None = None
    peak_gpu_memory: int | None = None

    def read(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The stage's rows, or some of their columns."""
        content = io.BytesIO(read_bytes(self.path))
        return pd.read_parquet(content, columns=None if columns is None else list(columns))

    @property
    def memory(self) -> str:
        """The process's peak, and the GPU's where there is one: '1.2 GiB + GPU 3.4 GiB'."""
        peaks = [self.peak_memory, self.peak_gpu_memory]
        return " + GPU ".join(f"{peak / 2**30:.1f} GiB" for peak in peaks if peak is not None)


class RunRecord(BaseModel, frozen=True):
    """One run, complete. Its figures are measured on private data: it is not for publication."""

    run_id: str
    recipe: Recipe
    guarantee: Guarantee
    data: dict[str, Any]
    model: dict[str, Any]
    started: datetime
    seconds: float
    versions: dict[str, str]
    stages: list[StageRecord]

    def stage(self, name: str) -> StageRecord:
        """The record of a stage, by name."""
        return next(s for s in self.stages if s.stage == name)


def library_versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
