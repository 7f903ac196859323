"""Publishing: the exact bytes that reach the hub."""

from __future__ import annotations

import base64
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from gradmm.errors import InputError
from gradmm.outputs.publish import COMMIT_MESSAGE, publish_release
from gradmm.outputs.release import RELEASE_FILES, write_release
from tests.unit.outputs.test_release import SENTIMENT, run_record, texts_of

TOKEN = "hf_" + "S3cret" * 6
REPOSITORY = "acme/reviews-synthetic"
URL = f"https://huggingface.co/datasets/{REPOSITORY}"


class Hub:
    """A fake hub that answers and records huggingface_hub's HTTP requests."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.requests: list[httpx2.Request] = []
        self.commits: list[list[dict[str, Any]]] = []
        self.before_commit: Callable[[], None] = lambda: None
        self.answers: dict[str, Callable[[httpx2.Request], httpx2.Response]] = {
            "/api/repos/create": self.create,
            f"/api/datasets/{REPOSITORY}": self.info,
            "/api/validate-yaml": lambda _: httpx2.Response(200, json={"errors": [], "warnings": []}),
            f"/api/datasets/{REPOSITORY}/preupload/main": self.preupload,
            f"/api/datasets/{REPOSITORY}/commit/main": self.commit,
        }

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        assert request.url.host == "huggingface.co"
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        return self.answers[request.url.path](request)

    def create(self, request: httpx2.Request) -> httpx2.Response:
        wanted = json.loads(request.content)
        name = f"{wanted['organization']}/{wanted['name']}"
        status = 409 if name in self.private else 200
        self.private.setdefault(name, wanted["visibility"] == "private")
        return httpx2.Response(status, json={"url": f"https://huggingface.co/datasets/{name}"})

    def info(self, _: httpx2.Request) -> httpx2.Response:
        if REPOSITORY not in self.private:
            return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"})
        return httpx2.Response(200, json={"id": REPOSITORY, "private": self.private[REPOSITORY]})

    def preupload(self, request: httpx2.Request) -> httpx2.Response:
        self.before_commit()
        modes = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            for file in json.loads(request.content)["files"]
        ]
        return httpx2.Response(200, json={"files": modes})

    def commit(self, request: httpx2.Request) -> httpx2.Response:
        self.commits.append([json.loads(line) for line in request.content.splitlines()])
        oid = f"{len(self.commits):040x}"
        return httpx2.Response(200, json={"commitUrl": f"{URL}/commit/{oid}", "commitOid": oid})

    @property
    def paths(self) -> list[str]:
        return [request.url.path for request in self.requests]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Without this the client sends telemetry once a day, without a token.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    hub = Hub()
    set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(hub.answer)))
    yield hub
    set_client_factory(default_client_factory)


def release_folder(folder: Path, **privacy: Any) -> Path:
    texts = texts_of(SENTIMENT, [f"a sentence about film {i}" for i in range(6)])
    write_release(folder, run_record(SENTIMENT, rows=12, **privacy), texts)
    return folder


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return release_folder(tmp_path / "run" / "release")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RELEASE_FILES}


def committed(commit: list[dict[str, Any]]) -> dict[str, bytes]:
    """Return the files of a commit that only adds files."""
    header, *operations = commit
    assert header == {"key": "header", "value": {"summary": COMMIT_MESSAGE, "description": ""}}
    for operation in operations:
        assert operation.keys() == {"key", "value"}
        assert operation["key"] == "file"
        assert operation["value"].keys() == {"content", "path", "encoding"}
    return {o["value"]["path"]: base64.b64decode(o["value"]["content"]) for o in operations}


def refusal(release: Path, repo_id: str = REPOSITORY, **options: bool) -> InputError:
    with pytest.raises(InputError) as refused:
        publish_release(release, repo_id, **options)
    assert TOKEN not in "".join(traceback.format_exception(refused.value))
    assert "\n" not in str(refused.value)
    return refused.value


def test_release_becomes_a_private_data_set_of_exactly_its_files(hub: Hub, release: Path) -> None:
    assert publish_release(release, REPOSITORY) == URL
    assert json.loads(hub.requests[0].content) == {
        "name": "reviews-synthetic",
        "organization": "acme",
        "visibility": "private",
        "type": "dataset",
    }
    assert [committed(commit) for commit in hub.commits] == [contents(release)]
    assert hub.paths == list(hub.answers)  # each once, the visibility before any file


def test_no_request_but_the_commit_and_its_preparation_carries_a_file(hub: Hub, release: Path) -> None:
    publish_release(release, REPOSITORY)
    by_path = {request.url.path: request.content for request in hub.requests}
    preupload = json.loads(by_path[f"/api/datasets/{REPOSITORY}/preupload/main"])
    assert {file["path"]: base64.b64decode(file["sample"]) for file in preupload["files"]} == {
        name: content[:512] for name, content in contents(release).items()
    }
    assert json.loads(by_path["/api/validate-yaml"])["content"] == (release / "README.md").read_text()
    for request in hub.requests:
        assert str(release).encode() not in request.content


def test_public_only_when_asked(hub: Hub, release: Path) -> None:
    assert publish_release(release, REPOSITORY, private=False) == URL
    assert hub.private == {REPOSITORY: False}
    assert len(hub.commits) == 1


@pytest.mark.parametrize("private", [True, False])
def test_existing_repository_of_the_visibility_asked_for_gets_a_new_commit(
    hub: Hub, release: Path, private: bool
) -> None:
    hub.private[REPOSITORY] = private
    for _ in range(2):
        assert publish_release(release, REPOSITORY, private=private) == URL
    assert [committed(commit) for commit in hub.commits] == 2 * [contents(release)]
    assert hub.private == {REPOSITORY: private}


def test_existing_repository_of_the_other_visibility_is_refused_and_sent_nothing(hub: Hub, release: Path) -> None:
    hub.private[REPOSITORY] = False
    assert str(refusal(release)) == (
        "acme/reviews-synthetic: this repository is public, not private; "
        "change that on the hub, ask for a public one, or choose another name"
    )
    hub.private[REPOSITORY] = True
    assert "is private, not public; change that on the hub, ask for a private one" in str(
        refusal(release, private=False)
    )
    assert hub.paths == 2 * ["/api/repos/create", f"/api/datasets/{REPOSITORY}"]
    assert hub.private == {REPOSITORY: True}


@pytest.mark.parametrize("answer", [{"id": REPOSITORY}, {"id": REPOSITORY, "private": None}])
def test_repository_that_does_not_say_whether_it_is_private_is_refused(
    hub: Hub, release: Path, answer: dict[str, Any]
) -> None:
    hub.answers[f"/api/datasets/{REPOSITORY}"] = lambda _: httpx2.Response(200, json=answer)
    for private in (True, False):
        refusal(release, private=private)
    assert not hub.commits


@pytest.mark.parametrize("without_guarantee", [False, True])
def test_seeded_noise_is_never_published(hub: Hub, tmp_path: Path, without_guarantee: bool) -> None:
    folder = release_folder(tmp_path / "release", unsafe_noise_seed=3)
    line = str(refusal(folder, without_guarantee=without_guarantee))
    assert line.startswith(f"{folder / 'privacy.json'}: the noise of this release was drawn from a seed")
    assert not hub.requests


@pytest.mark.parametrize("privacy", [{"epsilon": None}, {"epsilon": None, "unsafe_noise_seed": 3}])
def test_release_without_epsilon_is_published_only_by_saying_so(
    hub: Hub, tmp_path: Path, privacy: dict[str, Any]
) -> None:
    folder = release_folder(tmp_path / "release", **privacy)
    assert "no epsilon, hence no privacy guarantee" in str(refusal(folder))
    assert not hub.requests
    publish_release(folder, REPOSITORY, without_guarantee=True)
    assert committed(hub.commits[0]) == contents(folder)
    assert hub.private == {REPOSITORY: True}


@pytest.mark.parametrize("stray", ["notes.txt", "data/members.parquet", ".git/config", "run.json"])
def test_stray_file_is_refused_before_any_request(hub: Hub, release: Path, stray: str) -> None:
    (release / stray).parent.mkdir(exist_ok=True)
    (release / stray).write_text("private")
    assert f"not allowed: ['{stray}']" in str(refusal(release))
    assert not hub.requests


@pytest.mark.parametrize("file", sorted(RELEASE_FILES))
def test_missing_file_and_link_are_refused_before_any_request(
    hub: Hub, release: Path, tmp_path: Path, file: str
) -> None:
    (release / file).rename(tmp_path / "elsewhere")
    assert f"missing: ['{file}']" in str(refusal(release))
    (release / file).symlink_to(tmp_path / "elsewhere")
    assert f"not allowed: ['{file}']" in str(refusal(release))
    assert not hub.requests


def test_folder_that_is_not_there_or_is_a_run_is_refused(hub: Hub, release: Path) -> None:
    assert "is not a release folder" in str(refusal(release / "no"))
    assert "is not a release folder" in str(refusal(release.parent))
    assert not hub.requests


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values | {"safe": None},
        lambda values: {k: v for k, v in values.items() if k != "epsilon"},
        lambda values: {k: v for k, v in values.items() if k != "safe"},
        lambda values: values | {"safe": "true"},
        lambda values: values | {"epsilon": "0.05"},
        lambda values: values | {"epsilon": 0},
        lambda values: values | {"epsilon": float("nan")},
        lambda values: values | {"epsilon": float("inf")},
        lambda values: [values],
        lambda values: None,
    ],
)
def test_privacy_json_that_is_no_guarantee_is_refused(hub: Hub, release: Path, change: Callable) -> None:
    file = release / "privacy.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert "not a valid guarantee" in str(refusal(release, without_guarantee=True))
    file.write_bytes(b"\xff{")
    assert "not a valid guarantee" in str(refusal(release, without_guarantee=True))
    assert not hub.requests


@pytest.mark.parametrize(
    "repo_id", ["reviews", "", "a/b/c", "datasets/acme/reviews", "acme/re views", "acme/a--b"]
)
def test_name_that_is_no_repository_is_refused_before_any_request(hub: Hub, release: Path, repo_id: str) -> None:
    error = refusal(release, repo_id)
    assert (error.where, error.fix) == (repr(repo_id), "give owner/name")
    assert not hub.requests


def test_without_a_token_there_is_no_request(hub: Hub, release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradmm.outputs.publish.get_token", lambda: None)
    assert "no token for the hub" in str(refusal(release))
    assert not hub.requests


def test_what_changes_in_the_folder_while_it_is_sent_is_not_sent(hub: Hub, release: Path) -> None:
    before = contents(release)

    def interfere() -> None:
        (release / "members.txt").write_text("private")
        for name in RELEASE_FILES:
            (release / name).write_text("private")

    hub.before_commit = interfere
    publish_release(release, REPOSITORY)
    assert committed(hub.commits[0]) == before


def unreachable(_: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError("[Errno -2] Name or service not known")


def forbidden(request: httpx2.Request) -> httpx2.Response:
    """Answer like the hub, quoting the token."""
    message = f"You don't have the rights\nto write there with {request.headers['authorization']} or {TOKEN}"
    return httpx2.Response(403, json={"error": message})


def illegal_header(request: httpx2.Request) -> httpx2.Response:
    """Raise h11's error, with the header's value escaped."""
    raise httpx2.LocalProtocolError(f"Illegal header value b'Bearer {TOKEN[:9]}\\x7f{TOKEN[9:]}'")


def web_page(_: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, text="<html>Log in to the network\n</html>")


@pytest.mark.parametrize("call", range(5))
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (unreachable, "ConnectError: [Errno -2] Name or service not known"),
        (forbidden, "403 You don't have the rights to write there with [token] or [token]"),
        (illegal_header, "LocalProtocolError: Illegal header value b'[token]"),
        (web_page, "JSONDecodeError: Expecting value"),
    ],
)
def test_error_of_the_hub_is_one_line_without_the_token(
    hub: Hub,
    release: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    answer: Callable[[httpx2.Request], httpx2.Response],
    words: str,
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client retries
    path = list(hub.answers)[call]
    hub.answers[path] = answer
    error = refusal(release)
    assert error.where == REPOSITORY
    assert words in str(error)
    assert TOKEN[:9] not in str(error)
    assert path in hub.paths
    assert not hub.commits


def test_long_error_is_cut(hub: Hub, release: Path) -> None:
    hub.answers["/api/repos/create"] = lambda _: httpx2.Response(500, json={"error": "no " * 10_000})
    assert len(str(refusal(release))) < 600
