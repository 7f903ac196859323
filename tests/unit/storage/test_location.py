from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pydantic import TypeAdapter
from upath import UPath

from gradmm.errors import InputError
from gradmm.storage.artifacts import Root
from gradmm.storage.location import Location, create, location, put, reach, read_bytes

ADAPTER = TypeAdapter(Location)


@pytest.fixture
def store() -> UPath:
    place = location(f"memory://{uuid4().hex}")
    assert isinstance(place, UPath)
    return place


@pytest.mark.parametrize("text", ["a/b", "/a/b", "./~a", "./s3:/a", "C:\\a", ""])
def test_a_local_place_is_an_ordinary_path(text: str) -> None:
    assert type(location(text)) is type(Path(text))
    assert location(text) == location(Path(text)) == Path(text)


def test_a_home_is_expanded_and_an_unknown_user_is_refused() -> None:
    assert location("~/a") == location(Path("~/a")) == Path.home() / "a"
    for place in ("~nobody-such", "~nobody-such/a"):
        with pytest.raises(ValueError, match="no such user"):
            location(place)


def test_a_url_without_one_slash_is_no_folder() -> None:
    with pytest.raises(ValueError, match=r"did you mean s3://bucket/team\?"):
        location("s3:/bucket/team")


def test_a_url_is_preserved_and_a_file_url_is_a_path() -> None:
    for url in ("s3://bucket/team/root", "s3://bucket/team/root/", "memory://team"):
        place = location(url)
        assert not isinstance(place, Path)
        assert str(place) == url.rstrip("/")
        assert str(place / "runs" / "x") == f"{url.rstrip('/')}/runs/x"
        assert str(place.resolve()) == str(place)
        assert location(place) is place
    assert location("file:///a/b") == Path("/a/b")


@pytest.mark.parametrize("url", [
    "nowhere://a/b", "https://example.org/root", "S3://bucket", "s3://key:secret@bucket/team", "s3://bucket/te*m",
    "s3://bucket/team?endpoint_url=http://example.org", "s3://bucket/team#1",
])  # fmt: skip
def test_a_read_only_url_or_one_with_options_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        location(url)


@pytest.mark.parametrize("place", [None, 5, b"a/b"])
def test_what_is_neither_text_nor_a_path_is_no_location(place: Any) -> None:
    with pytest.raises(ValueError, match="is no path"):
        location(place)


@pytest.mark.parametrize("text", ["/a/b", "s3://bucket/a"])
def test_a_location_survives_json_and_has_the_schema_of_a_path(text: str) -> None:
    place = location(text)
    assert ADAPTER.dump_json(place) == f'"{text}"'.encode()
    assert ADAPTER.validate_json(ADAPTER.dump_json(place)) == place
    assert ADAPTER.dump_python(place) is place
    assert ADAPTER.json_schema() == {"type": "string", "format": "path"}


def test_listings_are_not_cached() -> None:
    place = location("s3://bucket/a")
    assert isinstance(place, UPath)
    assert (place / "b").storage_options == {"use_listings_cache": False}


def test_only_the_first_creates_an_object(store: UPath) -> None:
    create(store / "a", b"one")
    with pytest.raises(FileExistsError):
        create(store / "a", b"two")
    assert read_bytes(store / "a") == b"one"
    put(store / "a", b"three")
    assert read_bytes(store / "a") == b"three"
    with pytest.raises(FileNotFoundError):
        read_bytes(store / "b")


def test_an_object_is_created_even_if_the_client_retries(store: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client retries its request, and the store refuses the second one."""
    pipe = MemoryFileSystem.pipe_file

    def twice(self: MemoryFileSystem, *args: Any, **options: Any) -> None:
        pipe(self, *args, **options)
        pipe(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", twice)
    create(store / "a", b"one")
    assert read_bytes(store / "a") == b"one"


def test_other_errors_for_a_failed_condition_are_recognised(store: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(22, "At least one of the pre-conditions you specified did not hold")

    put(store / "a", b"one")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuses)
    with pytest.raises(FileExistsError):
        create(store / "a", b"two")
    with pytest.raises(InputError, match=r"/b: cannot be used \(.*did not hold\); check the bucket's name"):
        create(store / "b", b"two")


def test_a_root_in_a_store_that_overwrites_is_refused(store: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    Root(path=store).prepare()
    Root(path=store).prepare()
    pipe = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda self, path, content, mode="overwrite": pipe(self, path, content)
    )
    with pytest.raises(InputError, match=r"does not support conditional writes .*; choose another store"):
        Root(path=store).prepare()


def test_errors_of_a_client_are_reported_in_one_line(store: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        pass

    def fails(*_: object, **__: object) -> None:
        raise ClientError("no\nroute")

    reach(store)  # an empty store is valid
    for method in ("ls", "cat_file", "pipe_file"):
        monkeypatch.setattr(MemoryFileSystem, method, fails)
    for action in (reach, read_bytes, lambda place: put(place, b""), lambda place: create(place, b"")):
        with pytest.raises(InputError) as caught:
            action(store)
        assert str(caught.value).startswith(f"{store}: cannot be used (no route); check")


def test_a_missing_package_is_reported_in_one_line() -> None:
    lines = (
        "import sys; sys.modules['s3fs'] = None; from gradmm.deployments.cli.main import main; "
        "sys.exit(main(['runs', '--root', 's3://bucket/team']))"
    )
    finished = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith("gradmm: s3://bucket/team: a package is not installed (")
    assert line.endswith("; install 'gradmm[s3]'")
