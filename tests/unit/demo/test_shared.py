"""The demo of a root in an object store: built once, by the first machine."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
from upath import UPath

from gradmm.demo import material, shared
from gradmm.demo.material import DemoMaterial, build_demo, is_complete
from gradmm.demo.shared import demo_of
from gradmm.storage.artifacts import Root
from gradmm.storage.location import location
from tests.object_store import objects


@pytest.fixture
def root() -> Root:
    return Root(path=location(f"memory://{uuid4().hex}"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Build small, distinct material; return the folders written so far."""
    folders: list[Path] = []

    def write(folder: Path) -> None:
        folders.append(folder)
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "train.parquet").write_text(f"data {len(folders)}")
        digests = {"generator": material.generator_digest(), "files": material.digests_of(folder)}
        (folder / material.MARKER).write_text(json.dumps(digests))

    monkeypatch.setattr(material, "write_material", write)
    return folders


def machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate another machine by a separate cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def text_of(demo: DemoMaterial) -> str:
    return (demo.data / "train.parquet").read_text()


def test_a_folder_holds_its_own_demo(tmp_path: Path, made: list[Path]) -> None:
    assert demo_of(Root(path=tmp_path)) == build_demo(tmp_path / "demo")
    assert len(made) == 1


def test_machines_that_share_a_store_share_the_first_ones_demo(
    root: Root, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path / "one", monkeypatch)
    first = demo_of(root)
    assert first.data.is_relative_to(tmp_path / "one")
    assert demo_of(root) == first
    machine(tmp_path / "other", monkeypatch)
    second = demo_of(root)
    assert second.data.is_relative_to(tmp_path / "other")
    assert text_of(first) == text_of(second) == "data 1"
    assert len(made) == 1
    assert isinstance(root.path, UPath)
    (archive,) = objects(root.path)
    assert archive == f"demo/{material.generator_digest()}.zip"
    another = Root(path=location(f"memory://{uuid4().hex}"))
    assert text_of(demo_of(another)) == "data 2"


def test_two_concurrent_machines_both_use_the_first_archive(
    root: Root, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = shared.create

    def late(place, content: bytes) -> None:
        monkeypatch.setattr(shared, "create", create)
        with pytest.MonkeyPatch.context() as elsewhere:
            machine(tmp_path / "faster", elsewhere)
            assert text_of(demo_of(root)) == "data 2"
        create(place, content)

    monkeypatch.setattr(shared, "create", late)
    machine(tmp_path / "slower", monkeypatch)
    assert text_of(demo_of(root)) == "data 2"
    (cached,) = (tmp_path / "slower" / "gradmm").iterdir()
    assert is_complete(cached)
