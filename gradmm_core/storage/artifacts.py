"""Layout of the root, and the Parquet that every stage writes there.

    <root>/stages/<stage>/<key>.parquet     output of a stage; `key` is the digest of its inputs
    <root>/runs/<time>-<recipe>/            one run: run.json, report.html, release/
    <root>/ledger/                          releases by data set, and digests of their rows (`gradmm.privacy`)
    <root>/frames/                          frames that `gradmm.distil` was given; private
    <root>/unfinished/                      checkpoints of stages that are running or were killed
    <root>/results/                         Prefect's records of finished stages, a few hundred bytes each
    <root>/plots/                           plots of Prefect's pages; safe to delete
    <root>/errors/                          messages that may quote private records (`redaction`); delete after use

The root is a folder or the URL of an object store (`location`). Publishing is atomic: a file is written beside its
destination under a temporary name, then renamed (`atomic`); an object store writes objects atomically. A store
also holds `.probe`, which tests conditional writes, and `taken` in a run's folder, which reserves the run's id.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, model_validator

from gradmm.errors import InputError
from gradmm.storage.atomic import sweep, temporary_file
from gradmm.storage.location import Location, prove_exclusive, put, read_bytes
from gradmm.storage.schemas import SCHEMAS

#: Key of the stage's record in the Parquet metadata.
METADATA_KEY = b"gradmm"


@runtime_checkable
class StageOutput(Protocol):
    """A stage's rows and figures, in a file (`StageArtifact`) or in memory (`StageRows`)."""

    @property
    def figures(self) -> dict[str, Any]: ...

    def read_table(self) -> pa.Table: ...


@dataclass(frozen=True, eq=False)
class StageRows:
    """A stage's rows and figures in memory."""

    rows: pa.Table
    figures: dict[str, Any]

    def read(self) -> pd.DataFrame:
        """Return the rows as a data frame."""
        return self.rows.to_pandas()

    def read_table(self) -> pa.Table:
        """Return the rows, with the columns of the stage's schema."""
        return self.rows


class StageArtifact(BaseModel, frozen=True):
    """A reference to a stage's Parquet. Validation fails if the file is missing or has changed.

    Prefect stores it as JSON and validates it when it reads a cached result. A deleted or damaged file is thus a
    cache miss, and only that stage runs again. Validation downloads an object.
    """

    stage: str
    path: Location
    sha256: str
    rows: int
    figures: dict[str, Any]

    @model_validator(mode="after")
    def _file_is_intact(self) -> StageArtifact:
        try:
            digest = file_digest(self.path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ValueError(f"{self.path} is missing") from error
        if digest != self.sha256:
            raise ValueError(f"{self.path} has changed since it was written")
        return self

    def read(self) -> pd.DataFrame:
        """Read the rows as a data frame; see `read_table`."""
        return self.read_table().to_pandas()

    def read_table(self) -> pa.Table:
        """Read the rows and check them against the stage's schema.

        Raises:
            InputError: if another run has replaced the file since.
        """
        content = read_bytes(self.path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise InputError("it changed during the run", str(self.path), "run again")
        table = pq.read_table(pa.BufferReader(content))
        _check_schema(self.stage, table.schema, str(self.path))
        return table

    def record(self) -> dict[str, Any]:
        """Read the record in the file's metadata: stage, version, settings, upstream digests, figures."""
        return json.loads(pq.read_schema(pa.BufferReader(read_bytes(self.path))).metadata[METADATA_KEY])


class Root(BaseModel, frozen=True):
    """Folder, or prefix in an object store, for all files of a team's runs."""

    path: Location

    @property
    def results(self) -> Location:
        return self.path / "results"

    @property
    def errors(self) -> Location:
        return self.path / "errors"

    @property
    def runs(self) -> Location:
        return self.path / "runs"

    def stage_file(self, stage: str, key: str) -> Location:
        return self.path / "stages" / stage / f"{key}.parquet"

    def prepare(self) -> None:
        """Create the folder, private to its owner, and check that it or the object store is writable.

        Remove temporary files of killed runs.

        Raises:
            InputError: if it is not writable.
        """
        if not isinstance(self.path, Path):
            prove_exclusive(self.path / ".probe")
            return
        try:
            make_private(self.path)
            make_private(self.path / "results")  # Prefect would make it world-readable
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"x" * 4096)
        except OSError as error:
            raise InputError(
                f"{str(self.path)!r} cannot be written ({error.strerror})", "root", "choose another folder"
            ) from error
        for folder in ("stages", "runs", "unfinished", "plots", "ledger", "frames"):
            sweep(self.path / folder)

    def find_stage(self, stage: str, key: str) -> StageArtifact | None:
        """Find a stage's output by its key, without Prefect's cache. None if missing or damaged.

        Raises:
            OSError: if it cannot be read for another reason. A private target that is there must not be drawn
                again.
        """
        path = self.stage_file(stage, key)
        try:
            content = read_bytes(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            header = pq.read_metadata(pa.BufferReader(content))
            figures = json.loads(header.metadata[METADATA_KEY])["figures"]
        except (OSError, pa.ArrowException, TypeError, KeyError, ValueError):
            return None
        digest = hashlib.sha256(content).hexdigest()
        # Not validated: that would read the file again, and another run may have replaced it.
        return StageArtifact.model_construct(
            stage=stage, path=path, sha256=digest, rows=header.num_rows, figures=figures
        )

    def write_stage(
        self,
        stage: str,
        key: str,
        rows: pa.Table | pd.DataFrame,
        figures: dict[str, Any],
        record: dict[str, Any],
    ) -> StageArtifact:
        """Publish a stage's rows, with `record` (settings, upstream digests, ...) in the file's metadata.

        The bytes depend on the arguments only, not on time or location. If a stage reproduces its result, the
        stages after it stay cached.

        Raises:
            ValueError: if the rows do not match the stage's schema.
        """
        schema = SCHEMAS[stage]
        table: pa.Table = _as_table(rows, schema) if isinstance(rows, pd.DataFrame) else rows
        _check_schema(stage, table.schema, stage)
        annotated = {"stage": stage, **record, "figures": figures}
        metadata = {METADATA_KEY: json.dumps(annotated, sort_keys=True, allow_nan=False).encode()}
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
        path, content = self.stage_file(stage, key), buffer.getvalue()
        publish(path, content)
        digest = hashlib.sha256(content).hexdigest()
        return StageArtifact(stage=stage, path=path, sha256=digest, rows=table.num_rows, figures=figures)


def publish(path: Location, content: bytes) -> None:
    """Write a file or object atomically. A file is readable by its owner only."""
    if not isinstance(path, Path):
        put(path, content)
        return
    make_private(path.parent)
    with temporary_file(path) as (stream, temporary):
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
        os.replace(temporary, path)


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, accessible by their owner only."""
    for parent in reversed(folder.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def file_digest(path: Location) -> str:
    if not isinstance(path, Path):
        return hashlib.sha256(read_bytes(path)).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _as_table(frame: pd.DataFrame, schema: pa.Schema) -> pa.Table:
    if set(frame.columns) != set(schema.names):
        raise ValueError(f"columns {sorted(frame.columns)} do not match the schema {sorted(schema.names)}")
    return pa.Table.from_pandas(frame, schema=schema, preserve_index=False)


def _check_schema(stage: str, schema: pa.Schema, where: str) -> None:
    expected = SCHEMAS[stage]
    if [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in expected]:
        raise ValueError(f"{where} does not have the schema of {stage}: {schema} is not {expected}")
