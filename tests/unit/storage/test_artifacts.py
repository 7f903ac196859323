from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from uuid import uuid4

import pandas as pd
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gradmm.errors import InputError
from gradmm.storage.artifacts import Root, StageArtifact, publish
from gradmm.storage.location import location, read_bytes

FRAME = pd.DataFrame(
    {
        "arm": ["real"], "seed": [0], "learning_rate": [1e-4], "steps": [50], "step": [50], "split": ["test"],
        "accuracy": [0.5], "loss": [0.7], "correct": [None], "confusion": [None],
    }
)  # fmt: skip


def written(root: Root) -> StageArtifact:
    return root.write_stage("finetune_eval", "k1", FRAME, {"accuracy": 0.5}, {"settings": {"steps": 3}})


def test_a_stage_reads_back_with_its_record(tmp_path: Path) -> None:
    artifact = written(Root(path=tmp_path))
    pd.testing.assert_frame_equal(artifact.read(), FRAME)
    pd.testing.assert_frame_equal(pd.read_parquet(str(artifact.path)), FRAME)
    assert artifact.record() == {
        "stage": "finetune_eval", "settings": {"steps": 3}, "figures": {"accuracy": 0.5},
    }  # fmt: skip


def test_the_same_rows_give_the_same_bytes_anywhere(tmp_path: Path) -> None:
    first, second = written(Root(path=tmp_path / "a")), written(Root(path=tmp_path / "b"))
    assert first.sha256 == second.sha256


def test_a_reference_survives_json_but_not_a_lost_or_damaged_file(tmp_path: Path) -> None:
    artifact = written(Root(path=tmp_path))
    stored = artifact.model_dump_json()
    assert StageArtifact.model_validate_json(stored) == artifact
    content = artifact.path.read_bytes()
    artifact.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="has changed since it was written"):
        StageArtifact.model_validate_json(stored)
    artifact.path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        StageArtifact.model_validate_json(stored)


def test_rows_that_do_not_match_the_schema_are_not_written(tmp_path: Path) -> None:
    root = Root(path=tmp_path)
    with pytest.raises(ValueError, match="do not match the schema"):
        root.write_stage("finetune_eval", "k", FRAME.drop(columns="loss"), {}, {})
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run.json"
    publish(target, b"old")

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        publish(target, b"new")
    assert target.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_published_file_is_private_to_its_owner(tmp_path: Path) -> None:
    artifact = written(Root(path=tmp_path / "root"))
    assert stat.S_IMODE(artifact.path.stat().st_mode) == 0o600


def test_a_root_that_is_not_writable_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"root: .*file/root' cannot be written \(Not a directory\)"):
        Root(path=tmp_path / "file" / "root").prepare()


def test_figures_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Root(path=tmp_path).write_stage("finetune_eval", "k", FRAME, {"x": float("nan")}, {})


# In an object store


@pytest.fixture
def remote() -> Root:
    return Root(path=location(f"memory://{uuid4().hex}"))


def test_a_store_holds_the_same_bytes_as_a_folder(tmp_path: Path, remote: Root) -> None:
    local, far = written(Root(path=tmp_path)), written(remote)
    assert str(far.path) == f"{remote.path}/stages/finetune_eval/k1.parquet"
    assert read_bytes(far.path) == local.path.read_bytes()
    assert far.sha256 == local.sha256
    assert far.record() == local.record()
    pd.testing.assert_frame_equal(far.read(), FRAME)


def test_a_reference_to_an_object_survives_json_but_not_its_loss_or_damage(remote: Root) -> None:
    artifact = written(remote)
    stored = artifact.model_dump_json()
    assert StageArtifact.model_validate_json(stored) == artifact
    assert remote.find_stage("finetune_eval", "k1") == artifact
    content = read_bytes(artifact.path)
    publish(artifact.path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="has changed since it was written"):
        StageArtifact.model_validate_json(stored)
    assert remote.find_stage("finetune_eval", "k1") is None
    artifact.path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        StageArtifact.model_validate_json(stored)
    assert remote.find_stage("finetune_eval", "k1") is None


def test_an_output_that_another_run_replaces_is_found_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(path=tmp_path)
    artifact, content = written(root), []

    def replaced(file: Path) -> bytes:
        content.append(file.read_bytes())
        file.unlink()
        return content[-1]

    monkeypatch.setattr("gradmm.storage.artifacts.read_bytes", replaced)
    assert root.find_stage("finetune_eval", "k1") == artifact
    assert len(content) == 1


def test_a_file_that_cannot_be_read_is_an_error_not_a_cache_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a private target would be drawn and charged again."""
    root = Root(path=tmp_path)
    written(root)
    assert root.find_stage("finetune_eval", "another") is None

    def fails(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(OSError, match="too many open files"):
        root.find_stage("finetune_eval", "k1")


def test_an_unreachable_store_is_an_error_not_a_cache_miss(remote: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a private target would be drawn and charged again."""
    artifact = written(remote)

    def fails(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fails)
    with pytest.raises(InputError, match="no route"):
        remote.find_stage("finetune_eval", "k1")
    with pytest.raises(InputError, match="no route"):
        StageArtifact.model_validate_json(artifact.model_dump_json())


@pytest.mark.parametrize("where", ["folder", "store"])
def test_rows_replaced_by_another_run_are_refused(where: str, tmp_path: Path, remote: Root) -> None:
    root = Root(path=tmp_path) if where == "folder" else remote
    artifact = written(root)
    root.write_stage("finetune_eval", "k1", FRAME.assign(loss=0.6), {}, {})
    with pytest.raises(InputError, match=r"k1\.parquet: it changed during the run; run again"):
        artifact.read()
