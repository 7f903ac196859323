"""Names for what is on its way: swept once their process is gone, and never before."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradmm_core import temporary
from gradmm_core.artifacts import Root
from gradmm_core.temporary import NAME, sweep, temporary_file, temporary_folder

HOLDS = """
import sys
from pathlib import Path
from gradmm_core.temporary import temporary_file, temporary_folder
with temporary_folder(Path(sys.argv[1]) / "release") as folder, temporary_file(folder / "card") as (stream, _):
    with temporary_file(Path(sys.argv[1]) / "key.parquet"):
        print("held", flush=True)
        sys.stdin.read()
"""


def test_what_a_killed_process_leaves_is_swept_and_what_a_living_one_holds_stays(tmp_path: Path) -> None:
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


def test_an_error_leaves_nothing_and_a_renamed_one_stays(tmp_path: Path) -> None:
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


def test_one_that_was_swept_before_it_was_held_is_made_again(
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
            patch.setattr(temporary.fcntl, "flock", overtaken)
            with make(tmp_path / "place"):
                assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_swept_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(temporary.fcntl, "flock", unsupported)
    with temporary_file(tmp_path / "place"):
        sweep(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
