"""Record of a finished run in an MLflow tracking store.

MLFLOW_TRACKING_URI names the store, MLFLOW_EXPERIMENT_NAME the experiment (`gradmm` if unset). By default the
record depends on the release folder only: its files, its recipe's settings, the numbers of its guarantee and the
number of its texts. Figures, run.json and the report are measured on private data, and are logged on request, to
stores on this machine only.

MLflow's client is used, not `mlflow.start_run`, which would add the user, the command and the commit.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow.parquet as pq
import yaml

from gradmm.errors import InputError
from gradmm.outputs.formatting import leaves
from gradmm.outputs.publish import MAX_ERROR_LENGTH, check_promise, release_contents
from gradmm.outputs.release import TRAIN_FILE
from gradmm.storage.location import Location, read_bytes

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRACKING_URI, EXPERIMENT, DEFAULT_EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "gradmm"

#: The tag that holds the run's id.
RUN_ID = "gradmm.run_id"

PRIVATE_FILES = ("run.json", "report.html")

#: Parameters and metrics of one request, at most.
BATCH = 100


def track_run(
    folder: Location,
    figures: Mapping[str, Any] | None = None,
    without_guarantee: bool = False,
) -> str:
    """Log a run to the tracking store, as a new MLflow run that has the folder's name.

    Args:
        folder: the folder of a finished run.
        figures: private figures by stage, which may be nested. If given, they are logged with run.json and the
            report, to a store on this machine only.
        without_guarantee: log a release that was made without noise to a store that is elsewhere.

    Returns:
        The MLflow run's id.

    Raises:
        InputError: if MLflow is not installed or no store is named; if the folder has no release, or lacks a
            file; if something may not leave this machine and the store is elsewhere (nothing is sent in these
            cases); if the store refuses or cannot be reached.
    """
    uri = _tracking_uri()
    release = release_contents(folder / "release")
    private = {} if figures is None else {name: _read(folder / name) for name in PRIVATE_FILES}

    def check_place(place: str, setting: str) -> None:
        if _is_local(place):
            return
        check_promise(release["privacy.json"], str(folder / "release" / "privacy.json"), without_guarantee)
        if private:
            fix = "leave them out, or name a store on this machine: sqlite:///FOLDER/mlflow.db"
            raise InputError("figures of private data may not go to a store elsewhere", setting, fix)

    check_place(uri, TRACKING_URI)
    with _store_errors():
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = _experiment(client, os.environ.get(EXPERIMENT, DEFAULT_EXPERIMENT))
        check_place(experiment.artifact_location, EXPERIMENT)  # a local store may keep its files elsewhere
        run = client.create_run(experiment.experiment_id, run_name=folder.name, tags={RUN_ID: folder.name})
        status = "FAILED"
        try:
            _log_values(client, run.info.run_id, release, figures or {})
            _log_files(client, run.info.run_id, "release", release)
            _log_files(client, run.info.run_id, "private", private)
            status = "FINISHED"
        finally:
            client.set_terminated(run.info.run_id, status)
    return run.info.run_id


def _tracking_uri() -> str:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow does not accept DO_NOT_TRACK=1
    try:
        import mlflow  # noqa: F401
    except ImportError as error:
        raise InputError("MLflow is not installed", "track", "pip install 'gradmm[mlflow]'") from error
    if not (uri := os.environ.get(TRACKING_URI)):
        fix = "set it to a store: sqlite:///FOLDER/mlflow.db, or the address of an MLflow server"
        raise InputError("no tracking store is named", TRACKING_URI, fix)
    return uri


def _is_local(uri: str) -> bool:
    """Return whether a store or its files are on this machine. A server never is, whatever its address."""
    # Not every name without a scheme is a folder: "databricks" is a service.
    return uri.startswith("/") or urlsplit(uri).scheme in ("file", "sqlite")


def _experiment(client: MlflowClient, name: str) -> Any:
    experiment = client.get_experiment_by_name(name)
    return experiment or client.get_experiment(client.create_experiment(name))


def _log_values(
    client: MlflowClient, run_id: str, release: Mapping[str, bytes], figures: Mapping[str, Any]
) -> None:
    """Log settings as parameters, numbers as metrics."""
    from mlflow.entities import Metric, Param

    settings = leaves(yaml.safe_load(release["recipe.yaml"]))
    params = [
        Param(_key(name), value if isinstance(value, str) else json.dumps(value)) for name, value in settings
    ]
    numbers = {
        "texts": pq.read_metadata(io.BytesIO(release[TRAIN_FILE])).num_rows,
        "guarantee": json.loads(release["privacy.json"]),
        **figures,
    }
    now = int(1000 * time.time())
    metrics = [Metric(_key(name), float(value), now, 0) for name, value in leaves(numbers) if _is_number(value)]
    for first in range(0, max(len(params), len(metrics)), BATCH):
        batch = slice(first, first + BATCH)
        client.log_batch(run_id, metrics=metrics[batch], params=params[batch])


def _read(file: Location) -> bytes:
    try:
        return read_bytes(file)
    except FileNotFoundError as error:
        raise InputError("is missing", str(file), "run the recipe again: cached stages take seconds") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _key(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _log_files(client: MlflowClient, run_id: str, folder: str, contents: Mapping[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as copy:
        for name, content in contents.items():
            file = Path(copy) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        client.log_artifacts(run_id, copy, folder)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Convert errors of MLflow, of HTTP and of databases, which share no base class."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # `from None`: the error may quote the store's address with a password.
        answer = re.sub(r"//[^/\s@]*@", "//", f"{type(error).__name__}: {error}")
        answer = textwrap.shorten(answer, MAX_ERROR_LENGTH, placeholder=" ...")
        raise InputError(
            f"the store refuses or cannot be reached ({answer})",
            TRACKING_URI,
            "check the address, the network and MLflow's credentials",
        ) from None
