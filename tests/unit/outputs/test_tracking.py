"""Tracking: the exact contents that reach an MLflow store."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradmm.errors import InputError
from gradmm.outputs.release import RELEASE_FILES, write_release
from gradmm.outputs.tracking import RUN_ID, track_run
from tests.unit.outputs.test_release import PLANTED, SENTIMENT, run_record, texts_of

mlflow = pytest.importorskip("mlflow")

NO_NOISE = {"epsilon": None}
ELSEWHERE = "http://127.0.0.1:1"
FIGURES = {"finetune_eval": {"accuracy": {"synthetic": 0.75}, "seeds": [3, 4], "best": "real", "gap": math.nan}}


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new local store, which takes seconds to make."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def store(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an empty local store that the environment names."""
    uri = f"sqlite:///{shutil.copy(empty_database, tmp_path)}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)  # where MLflow puts files, in mlruns/
    return mlflow.MlflowClient(uri)


def finished_run(folder: Path, **privacy: Any) -> Path:
    record = run_record(SENTIMENT, rows=12, **privacy)
    write_release(
        folder / "release", record, texts_of(SENTIMENT, [f"a sentence about film {i}" for i in range(6)])
    )
    (folder / "run.json").write_text(record.model_dump_json())
    (folder / "report.html").write_text(f"<p>{PLANTED['path']}</p>")
    return folder


def stored_files(run: Any) -> dict[str, bytes]:
    folder = Path(run.info.artifact_uri)
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def everything_stored(folder: Path) -> bytes:
    files = [folder / "mlflow.db", *(file for file in (folder / "mlruns").rglob("*") if file.is_file())]
    return b"".join(file.read_bytes() for file in files)


def refusal(folder: Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as refused:
        track_run(folder, **options)
    assert "\n" not in str(refused.value)
    return refused.value


def test_a_run_is_logged_with_its_release_and_nothing_private(store: Any, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "a-run")
    run = store.get_run(track_run(folder))
    assert run.info.status == "FINISHED"
    assert run.info.run_name == run.data.tags[RUN_ID] == "a-run"
    assert set(run.data.tags) == {RUN_ID, "mlflow.runName"}
    assert stored_files(run) == {
        f"release/{name}": (folder / "release" / name).read_bytes() for name in RELEASE_FILES
    }
    recipe = yaml.safe_load((folder / "release" / "recipe.yaml").read_text())
    assert run.data.params["generation.method"] == recipe["generation"]["method"]
    assert float(run.data.params["privacy.epsilon"]) == run.data.metrics["guarantee.epsilon"] == 0.05
    assert run.data.metrics["texts"] == 12
    stored = everything_stored(tmp_path)
    for value in PLANTED.values():
        assert str(value).encode() not in stored


def test_private_figures_and_files_are_logged_if_asked_for(store: Any, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "a-run")
    run = store.get_run(track_run(folder, FIGURES))
    metrics = {name: value for name, value in run.data.metrics.items() if name.startswith("finetune_eval")}
    assert metrics == {
        "finetune_eval.accuracy.synthetic": 0.75,
        "finetune_eval.seeds.0": 3,
        "finetune_eval.seeds.1": 4,
    }
    files = stored_files(run)
    assert set(files) == {f"release/{name}" for name in RELEASE_FILES} | {
        "private/run.json",
        "private/report.html",
    }
    assert files["private/report.html"] == (folder / "report.html").read_bytes()


def test_a_private_report_that_was_removed_is_asked_for_in_a_line(store: Any, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "a-run")
    (folder / "report.html").unlink()
    assert str(refusal(folder, figures=FIGURES)).endswith(
        "report.html: is missing; run the recipe again: cached stages take seconds"
    )


@pytest.mark.parametrize("uri", [ELSEWHERE, "databricks", "postgresql://127.0.0.1/mlflow"])
@pytest.mark.parametrize("privacy", [{}, NO_NOISE])
def test_private_figures_stay_on_this_machine(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privacy: dict[str, Any], uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    folder = finished_run(tmp_path / "a-run", **privacy)
    assert refusal(folder, figures={}, without_guarantee=True).where == "MLFLOW_TRACKING_URI"


def test_a_local_store_may_keep_its_files_elsewhere(store: Any, tmp_path: Path) -> None:
    store.create_experiment("gradmm", artifact_location="s3://bucket/files")
    assert refusal(finished_run(tmp_path / "a-run"), figures={}).where == "MLFLOW_EXPERIMENT_NAME"
    without = refusal(finished_run(tmp_path / "another", **NO_NOISE))
    assert "no privacy guarantee" in without.what
    assert store.search_runs([store.get_experiment_by_name("gradmm").experiment_id]) == []


def test_a_release_without_a_guarantee_leaves_this_machine_only_if_asked(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_run(tmp_path / "a-run", **NO_NOISE)
    assert store.get_run(track_run(folder)).info.status == "FINISHED"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ELSEWHERE)
    assert "no privacy guarantee" in refusal(folder).what
    assert "cannot be reached" in refusal(folder, without_guarantee=True).what


def test_an_error_of_the_store_hides_its_password(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:S3cret@127.0.0.1:1")
    refused = refusal(finished_run(tmp_path / "a-run"))
    assert "cannot be reached" in refused.what
    assert "S3cret" not in str(refused)


def test_an_interrupted_run_is_marked_as_failed(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(mlflow.MlflowClient, "log_artifacts", full)
    assert "no space" in refusal(finished_run(tmp_path / "a-run")).what
    (run,) = store.search_runs([store.get_experiment_by_name("gradmm").experiment_id])
    assert run.info.status == "FAILED"


def test_without_a_store_nothing_is_logged(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert refusal(finished_run(tmp_path / "a-run")).where == "MLFLOW_TRACKING_URI"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ELSEWHERE)
    assert "not a release folder" in refusal(tmp_path / "nothing").what
