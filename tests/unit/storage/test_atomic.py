"""Temporary files are swept after their process has ended, and not before."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradmm.storage import atomic
from gradmm.storage.artifacts import Root
from gradmm.storage.atomic import NAME, sweep, temporary_file, temporary_folder

HOLDS = """
import sys
from pathlib import Path
from gradmm.storage.atomic import temporary_file, temporary_folder
with temporary_folder(Path(sys.argv[1]) / "release") as folder, temporary_file(folder / "card") as (stream, _):
    with temporary_file(Path(sys.argv[1]) / "key.parquet"):
        print("held", flush=True)
        sys.stdin.read()
"""


def test_files_of_a_killed_process_are_swept_and_locked_ones_kept(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "one"
    place.mkdir(parents=True)
    (place / ".hidden").touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        Root(path=tmp_path).prepare()
        held = {path.name for path in place.iterdir()}
        assert len(held) == 3
        assert sum(bool(NAME.fullmatch(name)) for name in held) == 2
        process.kill()
        process.wait()
        assert {path.name for path in place.iterdir()} == held
        Root(path=tmp_path).prepare()
    assert [path.name for path in place.iterdir()] == [".hidden"]


def test_temporary_files_are_removed_on_error_and_kept_when_renamed(tmp_path: Path) -> None:
    for make in (temporary_file, temporary_folder):
        with pytest.raises(AssertionError, match="not here"), make(tmp_path / "place"):
            assert not list(tmp_path.iterdir()), "not here"
        assert not list(tmp_path.iterdir())
    with temporary_folder(tmp_path / "place") as folder:
        (folder / "file").touch()
        os.replace(folder, tmp_path / "place")
    with temporary_file(tmp_path / "file") as (stream, name):
        stream.write(b"content")
        stream.flush()
        os.replace(name, tmp_path / "file")
    sweep(tmp_path)
    assert (tmp_path / "place" / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"content"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_swept_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[int] = []

    def overtaken(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(descriptor)
            sweep(tmp_path)
        real(descriptor, operation)

    real = fcntl.flock
    for make in (temporary_file, temporary_folder):
        swept.clear()
        with monkeypatch.context() as patch:
            patch.setattr(atomic.fcntl, "flock", overtaken)
            with make(tmp_path / "place"):
                assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_swept_without_support_for_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(atomic.fcntl, "flock", unsupported)
    with temporary_file(tmp_path / "place"):
        sweep(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
