"""The files that `clean` removes and keeps, on random roots, compared with a naive computation of references."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradmm.errors import InputError
from gradmm.outputs.housekeeping import check_root, removable, remove
from gradmm.privacy.ledger import Ledger
from gradmm.storage.artifacts import METADATA_KEY, file_digest
from tests.conftest import examples
from tests.unit.privacy.test_ledger import budget, release

STAGES = ("target_space", "target_gradient", "generation_shard", "generation", "label_filter")

#: Files older than this may be removed.
BEFORE = 1_000_000.0
OLD, YOUNG = BEFORE - 1, BEFORE + 1


@dataclass
class Made:
    """A stage of a random root, with the numbers of its inputs."""

    stage: str
    old: bool
    recorded: bool
    upstream: set[int]
    file: Path = field(default_factory=Path)


stage = st.builds(
    Made,
    stage=st.sampled_from(STAGES),
    old=st.booleans(),
    recorded=st.booleans(),
    upstream=st.sets(st.integers(0, 9), max_size=3),
)
few = st.sets(st.integers(0, 9), max_size=3)


def write(path: Path, content: bytes, old: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    time = OLD if old else YOUNG
    for each in (path, path.parent, path.parent.parent):  # a folder has the age of its content
        os.utime(each, (time, time))
    return path


def write_stages(root: Path, stages: list[Made]) -> None:
    """Write each stage with those of its `upstream` that come before it as inputs."""
    for number, made in enumerate(stages):
        made.upstream = {each for each in made.upstream if each < number}
        upstream = {"texts": [file_digest(stages[each].file) for each in sorted(made.upstream)]}
        described = json.dumps({"stage": made.stage, "upstream": upstream, "number": number})
        buffer = pa.BufferOutputStream()
        table = pa.table({"id": [number]}).replace_schema_metadata({METADATA_KEY: described.encode()})
        pq.write_table(table, buffer)
        content = buffer.getvalue().to_pybytes()
        made.file = write(root / "stages" / made.stage / f"key{number}.parquet", content, made.old)
        if made.recorded:
            write(root / "results" / made.stage / f"key{number}", b"{}", made.old)


def write_run(root: Path, name: str, files: list[Path]) -> None:
    """Write a run folder whose record names these stages at another root."""
    stages = [
        {"stage": file.parent.name, "path": f"/moved/stages/{file.parent.name}/{file.name}"} for file in files
    ]
    write(root / "runs" / name / "run.json", json.dumps({"stages": stages}).encode(), old=True)
    write(root / "runs" / name / "release" / "privacy.json", b"{}", old=True)


def charge(root: Path, key: str, digest: str | None) -> None:
    """Add a release to the data's ledger, finished if it has a digest."""
    with Ledger.of(root, "data").charge(release(stage_key=key), budget(1e9)) as finish:
        if digest:
            finish(digest)


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@examples(30)
@given(
    stages=st.lists(stage, max_size=10),
    of_runs=st.lists(few, max_size=2),
    unfinished_run=st.booleans(),
    charged=few,
    begun=few,
    others=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_nothing_that_a_run_a_release_or_the_ledger_needs_is_removed_and_all_else_is(
    stages: list[Made],
    of_runs: list[set[int]],
    unfinished_run: bool,
    charged: set[int],
    begun: set[int],
    others: list[bool],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_stages(root, stages)
        there = range(len(stages))
        for number, files in enumerate(of_runs):
            write_run(root, f"run{number}", [stages[each].file for each in files if each in there])
        if unfinished_run:
            write(root / "runs" / "unfinished" / "release" / "README.md", b"", old=True)
        targets = {each for each in there if stages[each].stage == "target_gradient"}
        for each in sorted(charged & targets):
            charge(root, "another key", file_digest(stages[each].file))
        for each in sorted(begun & targets):
            charge(root, stages[each].file.stem, None)
        rest = {
            name: (write(root / name, b"x", old), old)
            for name, old in zip(
                (
                    "plots/0123456789abcdef0123456789abcdef.md",
                    "unfinished/target_gradient-0123456789abcdef0123456789abcdef",
                    "stages/generation/.key.parquet.abcdefgh.tmp",
                    "runs/run0/.report.html.abcdefgh.tmp",
                    "results/0123456789abcdef0123456789abcdef",
                    ".demo-0123/model/config.json",
                ),
                others,
                strict=True,
            )
        }
        # Other people's, in folders of the same names.
        for name in ("plots/fig1.png", "plots/notes.md", "unfinished/chapter.tex", "results/thesis.csv"):
            rest[name] = (write(root / name, b"x", old=True), False)
        record_of_nothing = write(root / "results" / "generation" / "gone", b"{}", old=False)

        needed = {each for run in of_runs for each in run if each in there} | ((charged | begun) & targets)
        while more := {above for each in needed for above in stages[each].upstream} - needed:
            needed |= more
        before = snapshot(root)
        found = removable(root, BEFORE)
        assert snapshot(root) == before  # listing changes nothing
        assert sum(each.size for each in found) == sum(
            len(before[str(f.relative_to(root))])
            for each in found
            for f in ([each.path] if each.path.is_file() else each.path.rglob("*"))
            if f.is_file()
        )
        remove(found)

        after = snapshot(root)
        assert all(before[name] == content for name, content in after.items())
        for number, made in enumerate(stages):
            stays = number in needed or not made.old
            assert made.file.exists() == stays, made
            assert (root / "results" / made.stage / made.file.stem).exists() == (stays and made.recorded)
        for name, (path, old) in rest.items():
            assert path.exists() != old, name
        assert not record_of_nothing.exists()
        for name in before:
            if name.startswith("ledger/") or (name.startswith("runs/") and "/." not in name):
                assert name in after
        assert removable(root, BEFORE) == []


def test_a_folder_that_no_run_has_written_to_is_no_root(tmp_path: Path) -> None:
    write(tmp_path / "results" / "0123456789abcdef0123456789abcdef", b"", old=True)
    with pytest.raises(InputError, match="no run has written here"):
        check_root(tmp_path)
    write(tmp_path / "stages" / "generation" / "key.parquet", b"", old=True)
    check_root(tmp_path)


def test_a_record_or_a_ledger_that_cannot_be_read_stops_it(tmp_path: Path) -> None:
    file = write(tmp_path / "stages" / "generation" / "key.parquet", b"", old=True)
    charge(tmp_path, "another", "digest")
    assert [each.path for each in removable(tmp_path, BEFORE)] == [file]
    for content in (b"{", b"[]", b'{"stages": [{"stage": "generation"}]}'):
        record = write(tmp_path / "runs" / "run" / "run.json", content, old=True)
        with pytest.raises(InputError, match=r"run\.json: is damaged.*nothing was removed"):
            removable(tmp_path, BEFORE)
    record.unlink()
    ledger = Ledger.of(tmp_path, "data").file
    assert isinstance(ledger, Path)
    ledger.write_bytes(ledger.read_bytes().replace(b"intent", b"untent", 1))
    with pytest.raises(InputError, match="restore it from a backup"):
        removable(tmp_path, BEFORE)


def test_what_a_killed_release_of_any_stage_has_published_is_kept(tmp_path: Path) -> None:
    """Otherwise it would be drawn, and charged, again. So is an audit that no run has taken up yet."""
    for stage in ("target_gradient", "private_votes", "private_adapters", "contamination", "generation"):
        write(tmp_path / "stages" / stage / f"{stage}.parquet", b"", old=True)
    for stage in ("target_gradient", "private_votes", "private_adapters"):
        charge(tmp_path, stage, None)
    assert [each.path.stem for each in removable(tmp_path, BEFORE)] == ["generation"]


def test_what_disappears_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "stages" / "generation" / ".key.tmp", b"", old=True)
    found = removable(tmp_path, BEFORE)
    assert [each.path for each in found] == [file]
    shutil.rmtree(tmp_path / "stages")
    remove(found)
    write(tmp_path / "stages" / "generation" / ".key.tmp", b"", old=True)

    def gone(_: Path) -> os.stat_result:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "lstat", gone)
    assert removable(tmp_path, BEFORE) == []
