"""The whole flow with a root in an object store: S3's protocol, served on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import s3fs
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect_aws import AwsClientParameters, AwsCredentials
from pydantic import SecretStr
from upath import UPath

from gradmm.config.recipe import Recipe
from gradmm.deployments.cli.main import main
from gradmm.deployments.serving.credentials import use_aws_credentials
from gradmm.deployments.serving.recipe_deployment import deployed_recipe, parameters
from gradmm.errors import BudgetExhausted, InputError
from gradmm.flows.distil import distil
from gradmm.flows.ui.pages import stage_page
from gradmm.lm.model_reference import ModelReference
from gradmm.metrics.resemblance import resemblance
from gradmm.outputs.folder import write_run
from gradmm.outputs.record import RunRecord
from gradmm.privacy.ledger import Ledger
from gradmm.storage.artifacts import Root
from gradmm.storage.location import location
from gradmm.tasks.runtime import inputs
from tests.flows.conftest import tiny_recipe_values
from tests.flows.test_cli import gradmm
from tests.flows.test_distil import EVERY_STAGE, ran, run
from tests.object_store import new_bucket, object_store, objects

PRIVACY = {"epsilon": 4.0, "delta": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    with object_store():
        yield


@pytest.fixture(scope="module")
def recipe_file(tiny_data: Path, tiny_model: ModelReference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_recipe_values(tiny_data, tiny_model)))
    return file


@pytest.fixture(scope="module")
def root(recipe_file: Path) -> UPath:
    """A root in which the command has run the tiny recipe. Tests may run it again, and leave it whole."""
    place = new_bucket("tiny") / "team"
    finished = gradmm("run", recipe_file, "--root", place)
    assert finished.status == 0, finished.err
    (folder,) = (place / "runs").iterdir()
    told = "".join(finished.out.split())
    assert f"dataset:{folder}/release" in told
    assert f"report:{folder}/report.html" in told
    return place


def first_record(root: UPath) -> RunRecord:
    folder = min((root / "runs").iterdir())
    return RunRecord.model_validate_json((folder / "run.json").read_bytes())


def forget_blocks() -> None:
    """Makes Prefect's server one that has never seen a root."""
    with get_client(sync_client=True) as client:
        for block in client.read_block_documents():
            if block.name and block.name.startswith("gradmm-"):
                client.delete_block_document(block.id)


def test_a_store_gets_what_a_folder_gets(root: UPath, tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    local, far = run(tiny_recipe(), tmp_path), first_record(root)
    assert [stage.stage for stage in far.stages] == EVERY_STAGE
    assert ran(far) == EVERY_STAGE
    there = objects(root)

    def of_a_run(name: str) -> str:
        first, _, rest = name.partition("/")
        return f"runs/{rest.partition('/')[2]}" if first == "runs" else name

    files = {file.relative_to(tmp_path).as_posix(): file for file in tmp_path.rglob("*") if file.is_file()}
    assert {of_a_run(name) for name in files} == {of_a_run(name) for name in there} - {".probe", "runs/taken"}
    for name, file in files.items():
        if name.startswith("stages/"):
            assert there[name] == file.read_bytes(), name
    for name in ("release/data/train-00000-of-00001.parquet", "release/README.md", "release/privacy.json"):
        assert there[f"runs/{far.run_id}/{name}"] == (tmp_path / "runs" / local.run_id / name).read_bytes()
    for stage in far.stages:
        assert str(stage.path) == f"{root}/stages/{stage.stage}/{stage.path.name}"


def test_a_second_run_reads_all_stages_whatever_prefect_server_it_has(
    root: UPath, tiny_recipe: Callable[..., Recipe]
) -> None:
    forget_blocks()
    record = run(tiny_recipe(), root)
    assert ran(record) == []
    assert ran(run(tiny_recipe(), str(root))) == []


def test_a_lost_or_damaged_object_is_made_again_and_nothing_else(
    root: UPath, tiny_recipe: Callable[..., Recipe]
) -> None:
    before = objects(root)
    stages = {name: content for name, content in before.items() if name.startswith("stages/")}
    lost = next(name for name in stages if "/target_gradient/" in name)
    damaged = next(name for name in stages if "/loss_selection/" in name)
    (root / lost).unlink()
    assert ran(run(tiny_recipe(), root)) == ["target_gradient"]
    root.fs.pipe_file((root / damaged).path, stages[damaged][:-1] + b"?")
    assert ran(run(tiny_recipe(), root)) == ["loss_selection"]
    after = objects(root)
    assert {name: content for name, content in after.items() if name.startswith("stages/")} == stages


def test_a_changed_setting_runs_what_follows(root: UPath, tiny_recipe: Callable[..., Recipe]) -> None:
    changed = run(tiny_recipe(loss_selection={"per_class": 2}), root)
    assert ran(changed) == [
        "loss_selection",
        "category_balance",
        "labelling",
        "finetune_eval",
        "mia_audit",
        "memorisation",
    ]


def test_runs_are_listed_compared_and_their_reports_found(
    root: UPath, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gradmm("run", recipe_file, "--root", root, "--set", "mia_audit.runs=3").status == 0
    folders = sorted((root / "runs").iterdir())
    listed = gradmm("runs", "--root", root)
    assert listed.status == 0
    assert listed.err == ""
    assert f"runs under {root}" in listed.out
    assert all(folder.name in listed.out for folder in folders)

    first, last = folders[0], folders[-1]
    compared = gradmm("diff", first.name, last.name, "--root", root)
    assert "mia_audit.runs" in compared.out
    assert gradmm("diff", first, last).out == compared.out

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    reported = gradmm("report", first.name, "--root", root, "--open")
    assert (reported.status, reported.out) == (0, f"{first}/report.html\n")
    (copy,) = (Path(url.removeprefix("file://")) for url in opened)
    assert copy.read_bytes() == (first / "report.html").read_bytes()
    assert copy.parent.stat().st_mode & 0o077 == 0
    assert f"pd.read_parquet(&#39;{root}/stages/" in copy.read_text()

    unknown = gradmm("report", "zzz", "--root", root)
    assert unknown.status == 2
    assert f"gradmm: {root}: no run 'zzz'" in unknown.err


def test_a_run_that_did_not_finish_is_told(root: UPath) -> None:
    begun = root / "runs" / "20200101T000000Z-tiny"
    root.fs.pipe_file((begun / "taken").path, b"")
    listed = gradmm("runs", "--root", root)
    assert listed.err == f"gradmm: skipped {begun}: no run.json: not a finished run; run the recipe again\n"
    (begun / "taken").unlink()


def test_a_stage_is_read_by_the_line_that_pages_give(root: UPath) -> None:
    record = first_record(root).stage("generation")
    assert len(pd.read_parquet(str(record.path))) == record.rows


def test_pages_show_the_url(root: UPath) -> None:
    record = first_record(root)
    page = stage_page(record.stage("generation"), record.recipe, "")
    assert f"pd.read_parquet('{root}/stages/generation/" in page.markdown


def test_runs_of_one_second_take_folders_of_their_own(root: UPath) -> None:
    record = first_record(root)
    texts, evaluation, audit = (
        Root(path=root).find_stage(name, record.stage(name).path.stem)
        for name in ("labelling", "finetune_eval", "mia_audit")
    )
    assert texts is not None
    assert evaluation is not None
    assert audit is not None
    before = objects(root)
    compared = resemblance(["a text"], ["a row"], seed=0)
    second, third = (
        write_run(Root(path=root), record, texts, evaluation, audit, compared).run_id for _ in range(2)
    )
    assert (second, third) == (f"{record.run_id}-2", f"{record.run_id}-3")
    assert before.items() <= objects(root).items()
    root.fs.rm([(root / "runs" / run_id).path for run_id in (second, third)], recursive=True)


def test_publish_reads_a_release_where_it_is(root: UPath) -> None:
    folder = min((root / "runs").iterdir())
    finished = gradmm("publish", folder, "--repo", "acme/texts")
    assert finished.status == 2
    assert finished.err.startswith(f"gradmm: {folder}/release/privacy.json: this release has no epsilon")
    assert gradmm("publish", folder.name, "--root", root, "--repo", "acme/texts").err == finished.err


def test_a_private_run_is_charged_once_and_refused_when_the_budget_is_spent(
    tiny_recipe: Callable[..., Recipe], recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_bucket("private") / "team"
    first = run(tiny_recipe(privacy=PRIVACY), root)
    (entry,) = Ledger.of(root, first.recipe.ledger).entries()
    assert entry.sha256 == first.stage("target_gradient").sha256
    assert first.guarantee.releases == 1
    root.fs.rm((root / "results").path, recursive=True)  # all that Prefect remembers
    forget_blocks()
    resumed = run(tiny_recipe(privacy=PRIVACY), root)
    assert resumed.stage("target_gradient").sha256 == entry.sha256
    assert Ledger.of(root, first.recipe.ledger).entries() == [entry]

    other = tiny_recipe(privacy=PRIVACY | {"clipping_norm": 2.0})
    before = objects(root)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "load_splits", lambda *_: pytest.fail("private data were read"))
        with pytest.raises(BudgetExhausted, match=r"budget of 4 \(1 release so far\)"):
            run(other, root)
    assert {n: c for n, c in objects(root).items() if "/target_gradient/" in n or n.startswith("ledger/")} == {
        n: c for n, c in before.items() if "/target_gradient/" in n or n.startswith("ledger/")
    }

    private = ["--set", "privacy.epsilon=4", "--set", "privacy.delta=1e-5", "--root", root]
    told = gradmm("privacy", recipe_file, *private)
    assert told.status == 0
    assert f"ledger: {root}/ledger/" in told.out
    assert "spent: epsilon 4 of 4" in told.out

    for line in objects(root / "ledger"):
        root.fs.rm_file((root / "ledger" / line).path)
    with pytest.raises(InputError, match="restore the ledger from a backup"):
        run(tiny_recipe(privacy=PRIVACY), root)


COMMANDS = (["runs"], ["diff", "a", "b"], ["report", "a"], ["privacy", "RECIPE"], ["run", "RECIPE"])


def refused(root: str, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The one line that each command says of a root."""
    lines = set()
    for command in COMMANDS:
        words = [str(recipe_file) if word == "RECIPE" else word for word in command]
        assert main([*words, "--root", root]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        lines.add(line)
    return lines


def test_a_bucket_that_is_not_there_is_told(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in refused("s3://no-such-bucket/team", recipe_file, capsys):
        assert line.startswith("gradmm: s3://no-such-bucket/team")
        assert "cannot be used (The specified bucket does not exist); check the bucket's name" in line


def test_missing_credentials_and_a_server_that_is_not_there_are_told(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_bucket("closed")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for change, told in (
        (lambda: monkeypatch.delenv("AWS_ACCESS_KEY_ID"), "Unable to locate credentials"),
        (lambda: monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test"), None),
        (
            lambda: monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
            "Could not connect to the end",
        ),
    ):
        change()
        s3fs.S3FileSystem.clear_instance_cache()
        if told:
            assert all(told in line for line in refused("s3://closed/team", recipe_file, capsys))
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("root", ["nowhere://bucket", "~nobody-such"])
def test_what_is_no_place_is_told(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["runs"], ["run", "demo"]):
        assert main([*command, "--root", root]) == 2
        assert f"gradmm: --root: {root!r} is neither a folder nor an object store" in capsys.readouterr().err


def test_a_deployment_keeps_the_url(tiny_recipe: Callable[..., Recipe]) -> None:
    assert parameters(tiny_recipe(), location("s3://bucket/team"))["root"] == "s3://bucket/team"
    assert deployed_recipe("demo", "s3://bucket/team")["root"] == "s3://bucket/team"
    assert deployed_recipe("demo", "team")["root"] == str(Path("team").resolve())
    form = distil.parameters.model_dump()["properties"]["root"]
    assert (form["type"], form["format"]) == ("string", "path")
    assert json.loads(json.dumps(form["default"])) == "gradmm-root"


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A block with the store's credentials, in place of AWS's environment variables."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")
    key, secret, region, endpoint = (os.environ[name] for name in names)
    for name in names:
        monkeypatch.setenv(name, "")  # which is put back, also where the test sets it
        monkeypatch.delenv(name)
    credentials = AwsCredentials(
        aws_access_key_id=key,
        aws_secret_access_key=SecretStr(secret),
        region_name=region,
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )
    credentials.save("team-store")
    s3fs.S3FileSystem.clear_instance_cache()
    yield "team-store"
    AwsCredentials.delete("team-store")
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_block_has_the_credentials(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot be used"):
        Root(path=location("s3://by-block/team")).prepare()
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):  # of somebody else
        monkeypatch.setenv(name, "other")
    use_aws_credentials(block)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "test"
    assert not {"AWS_SESSION_TOKEN", "AWS_PROFILE"} & set(os.environ)
    new_bucket("by-block")
    Root(path=location("s3://by-block/team")).prepare()
    with pytest.raises(InputError, match=r"--aws-credentials other: the Prefect server has no block of this name"):
        use_aws_credentials("other")


def test_no_server_starts_for_a_block_that_could_not_be_read(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = "gradmm.deployments.serving.serve.running_server"
    monkeypatch.setattr(server, lambda _: pytest.fail("a server starts"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["serve", str(recipe_file), "--root", "s3://x/y", "--aws-credentials", "team-store"]) == 2
    line = "gradmm: --aws-credentials: prefect-aws is not installed; pip install 'gradmm[aws]'"
    assert line in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
def test_runs_of_a_served_recipe_have_the_credentials_of_a_block(
    root: UPath, recipe_file: Path, prefect_server: str, block: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "gradmm.deployments.cli.main", "serve", str(recipe_file)]
    environment = os.environ | {"PREFECT_API_URL": prefect_server, "AWS_EC2_METADATA_DISABLED": "true"}
    log = tmp_path / "log"
    with (
        log.open("wb") as said,
        subprocess.Popen(
            [*command, "--root", str(root), "--aws-credentials", block], env=environment, stdout=said, stderr=said
        ) as served,
    ):
        try:
            while "Serving" not in log.read_text():
                assert served.poll() is None, log.read_text()
                time.sleep(0.1)
            ended = run_deployment("gradmm/tiny", timeout=200, poll_interval=0.5, as_subflow=False)
            assert isinstance(ended, FlowRun)
            assert ended.state is not None
            assert (ended.state.type, ended.state.name) == (StateType.COMPLETED, "Unchanged"), log.read_text()
        finally:
            served.terminate()
    assert not {"AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"} & os.environ.keys()
