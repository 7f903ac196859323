"""Where a run's files live, and the Parquet that every stage leaves there.

    <root>/stages/<stage>/<key>.parquet     what a stage made; `key` is the digest of what it was made from
    <root>/runs/<time>-<recipe>/            one run: run.json, report.html, release/
    <root>/unfinished/                      what stages that are at work, or were killed, would go on from
    <root>/results/                         Prefect's records of finished stages, a few hundred bytes each
    <root>/plots/                           the plots of Prefect's pages; deleting them loses nothing
    <root>/errors/                          messages that may quote private records (`withheld`); to be deleted

The root is a folder, or a URL of an object store (`location`). Files are published whole or not at all: written
beside their place under a temporary name, then renamed (`temporary`); an object's write is atomic by itself. A
store also holds `.probe`, by which it has shown that it can be used, and in a run's folder `taken`, by which the
run got it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, model_validator

from gradmm_core.errors import InputError
from gradmm_core.location import Location, prove_exclusive, put, read_bytes
from gradmm_core.schemas import SCHEMAS
from gradmm_core.temporary import sweep, temporary_file

#: The key of the stage's record in a Parquet's own metadata.
METADATA_KEY = b"gradmm"


class StageArtifact(BaseModel, frozen=True):
    """A small reference to a stage's Parquet. It cannot be made of a file that is missing or has changed.

    Prefect stores it as JSON and validates it when a cached result is read: a deleted or damaged file is then
    a cache miss, and only that stage runs again. An object is downloaded for that.
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
        """The rows, checked against the stage's schema."""
        return self.read_table().to_pandas()

    def read_table(self) -> pa.Table:
        """The same as a table.

        Raises:
            InputError: if another run, elsewhere, has put something else in its place since.
        """
        content = read_bytes(self.path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise InputError("it changed while the run was going on", str(self.path), "run again")
        table = pq.read_table(pa.BufferReader(content))
        _check_schema(self.stage, table.schema, str(self.path))
        return table

    def record(self) -> dict[str, Any]:
        """What the file says of itself: stage, version, settings, upstream digests, figures."""
        return json.loads(pq.read_schema(pa.BufferReader(read_bytes(self.path))).metadata[METADATA_KEY])


class Root(BaseModel, frozen=True):
    """The folder, or the prefix in an object store, that holds everything a team's runs leave behind."""

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
        """Makes the folder, private to its owner, and proves that it, or the object store, can be written.

        What killed runs have left there under temporary names is removed.

        Raises:
            InputError: if it cannot.
        """
        if not isinstance(self.path, Path):
            prove_exclusive(self.path / ".probe")
            return
        try:
            make_private(self.path)
            make_private(self.path / "results")  # before Prefect does, which would let everybody in
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"x" * 4096)
        except OSError as error:
            raise InputError(
                f"{str(self.path)!r} cannot be written ({error.strerror})", "--root", "choose another folder"
            ) from error
        for folder in ("stages", "runs", "unfinished", "plots"):
            sweep(self.path / folder)

    def find_stage(self, stage: str, key: str) -> StageArtifact | None:
        """What a stage left under a key, found without any cache; None if it is missing or damaged."""
        path = self.stage_file(stage, key)
        try:
            content = read_bytes(path)
            described = pq.read_metadata(pa.BufferReader(content))
            figures = json.loads(described.metadata[METADATA_KEY])["figures"]
        except (OSError, pa.ArrowException, TypeError, KeyError, ValueError):
            return None
        digest = hashlib.sha256(content).hexdigest()
        return StageArtifact(stage=stage, path=path, sha256=digest, rows=described.num_rows, figures=figures)

    def write_stage(
        self,
        stage: str,
        key: str,
        rows: pa.Table | pd.DataFrame,
        figures: dict[str, Any],
        record: dict[str, Any],
    ) -> StageArtifact:
        """Publishes a stage's rows with `record` (settings, upstream digests, ...) in the file's metadata.

        The bytes depend on the arguments only, never on time or place, so that a stage that comes to the same
        result again leaves what follows it cached.

        Raises:
            ValueError: if the rows do not fit the stage's schema.
        """
        schema = SCHEMAS[stage]
        table: pa.Table = _as_table(rows, schema) if isinstance(rows, pd.DataFrame) else rows
        _check_schema(stage, table.schema, stage)
        described = {"stage": stage, **record, "figures": figures}
        metadata = {METADATA_KEY: json.dumps(described, sort_keys=True, allow_nan=False).encode()}
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
        path, content = self.stage_file(stage, key), buffer.getvalue()
        publish(path, content)
        digest = hashlib.sha256(content).hexdigest()
        return StageArtifact(stage=stage, path=path, sha256=digest, rows=table.num_rows, figures=figures)


def publish(path: Location, content: bytes) -> None:
    """Writes a file, or an object, whole or not at all; a file is readable by its owner only."""
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
    """Makes a folder, and what it lies in, where missing: for their owner only."""
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
        raise ValueError(f"columns {sorted(frame.columns)} do not fit the schema {sorted(schema.names)}")
    return pa.Table.from_pandas(frame, schema=schema, preserve_index=False)


def _check_schema(stage: str, schema: pa.Schema, where: str) -> None:
    expected = SCHEMAS[stage]
    if [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in expected]:
        raise ValueError(f"{where} does not have the schema of {stage}: {schema} is not {expected}")
