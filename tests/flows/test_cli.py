"""The command line: errors in one line, output for people and for scripts, and the state after an interrupt."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL
from safetensors.torch import load_file, save_file

from gradmm.audits.mechanism_audit import MechanismAudit, mechanism_audit
from gradmm.config.settings import MechanismAuditSettings
from gradmm.deployments.cli.main import main
from gradmm.deployments.cli.study_commands import StudyOptions
from gradmm.flows.runtime.stopping import stopped_by_signals
from gradmm.generation import endpoint
from gradmm.generation.generation import generate
from gradmm.lm.model_reference import ModelReference
from gradmm.outputs.record import RunRecord
from gradmm.privacy.ledger import Budget, Ledger
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.storage.location import Location
from tests.flows.conftest import tiny_recipe_values


@pytest.fixture
def recipe_file(tiny_data: Path, tiny_model: ModelReference, tmp_path: Path) -> Path:
    """The tiny recipe as a file; a test may write another one in its place."""
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_recipe_values(tiny_data, tiny_model)))
    return file


@dataclass
class Finished:
    status: int
    out: str
    err: str


def gradmm(*arguments: str | Location) -> Finished:
    """Run the command in this process. Not with capsys: Prefect's log keeps its stream, and capsys closes it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return Finished(status, out.getvalue(), err.getvalue())


def refused(*arguments: str | Path) -> str:
    """Run a recipe, which has to end with status 2, and return its line on stderr."""
    (line,) = problems(*arguments)
    return line


def problems(*arguments: str | Path) -> list[str]:
    """Do the same for several problems, which have a line each."""
    finished = gradmm("run", *arguments)
    assert finished.status == 2, finished.err
    return [line.removeprefix("gradmm: ") for line in finished.err.splitlines() if line.startswith("gradmm: ")]


def test_unknown_recipe() -> None:
    assert refused("sst3") == "RECIPE: no recipe 'sst3'; did you mean 'sst2'?"
    assert refused("no.yaml").startswith("RECIPE: no file 'no.yaml'; give the path of a recipe")


def test_unknown_preset(recipe_file: Path, tmp_path: Path) -> None:
    assert refused(recipe_file, "--preset", "papr") == "--preset: no preset 'papr'; did you mean 'paper'?"
    unlike = refused(recipe_file, "--preset", "fast")
    names = "paper, rerank, search, zero-shot"
    assert unlike == f"--preset: no preset 'fast'; choose from {names}, or give a .yaml file"
    assert refused(recipe_file, "--preset", "no.yaml").startswith(
        "--preset: no file 'no.yaml'; give the path of a"
    )
    preset = tmp_path / "mine.yaml"
    preset.write_text("generation: {serch: {draws: 3}}")
    line = refused(recipe_file, "--preset", preset)
    assert line == f"{preset}: unknown setting 'generation.serch'; did you mean 'generation.search'?"


def test_unknown_setting(recipe_file: Path) -> None:
    line = refused(recipe_file, "--set", "generation.admm.roh=1")
    assert line.endswith("unknown setting 'generation.admm.roh'; did you mean 'generation.admm.rho'?")


def test_epsilon_that_is_not_positive(recipe_file: Path) -> None:
    for value in ("0", "-1"):
        line = refused(recipe_file, "--set", f"privacy.epsilon={value}")
        assert "privacy.epsilon: input should be greater than 0, not" in line


def test_unknown_stage_to_force(recipe_file: Path) -> None:
    assert refused(recipe_file, "--force", "filter").startswith("--force: no stage 'filter'; choose from target")


def test_missing_data_folder_and_column(recipe_file: Path, tmp_path: Path, tiny_data: Path) -> None:
    root = ["--root", str(tmp_path / "root")]
    assert "/no/such: cannot be listed" in refused(recipe_file, *root, "--set", "data.path=/no/such")
    said = "no column 'body' among the columns 'text', 'label'; set data.text_column"
    assert problems(recipe_file, *root, "--set", "data.text_column=body") == [
        f"{tiny_data}/{split}.parquet: {said}" for split in ("train", "validation", "test")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows.assign(label=rows["label"] + 7),
            "row 0 has a label that belongs to no class (and 39 more rows); add a class",
        ),
        (lambda rows: rows[rows["label"] == 0], "no row of split 'train' has the label 1"),
        (lambda rows: rows.assign(text="  "), "row 0 has an empty text"),
    ],
)
def test_data_that_does_not_fit_the_classes(
    recipe_file: Path, tiny_data: Path, tmp_path: Path, change, message: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    change(pd.read_parquet(data / "train.parquet")).to_parquet(data / "train.parquet")
    line = refused(recipe_file, "--set", f"data.path={data}", "--root", str(tmp_path / "root"))
    assert message in line
    assert not list((tmp_path / "root").rglob("*.parquet"))


def test_verbalisers_that_clash(recipe_file: Path, tmp_path: Path) -> None:
    line = refused(recipe_file, "--set", "classes.0.verbaliser=' good again'", "--root", str(tmp_path / "root"))
    assert "the verbalisers ' good again' and ' good' begin with the same token; choose words with" in line


def test_nan_weights(recipe_file: Path, tiny_model: ModelReference, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model.name, broken)
    weights = load_file(broken / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    line = refused(recipe_file, "--set", f"model.name={broken}", "--root", str(tmp_path / "root"))
    assert "has NaN or infinite weights in" in line


def test_a_server_that_cannot_be_reached_is_reported_in_one_line(
    recipe_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "RETRY", endpoint.RETRY.new(backoff_factor=0.0))
    settings = ["--set", "generation.endpoint={url: 'http://127.0.0.1:9/v1', model: served}"]
    settings += ["--set", "generation.method=written", "--set", "generation.whole_sentences=false"]
    log = logging.getLogger("urllib3")
    log.setLevel(logging.NOTSET)
    log.addHandler(caplog.handler)  # Prefect removes the root logger's handlers
    try:
        line = refused(recipe_file, *settings)
    finally:
        log.removeHandler(caplog.handler)
    assert line.startswith("generation.endpoint.url: http://127.0.0.1:9/v1 cannot be reached")
    assert [record.name for record in caplog.records if record.name.startswith("urllib3")] == []


def test_unwritable_root(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(recipe_file, "--root", tmp_path / "file" / "root")
    assert "cannot be written (Not a directory); choose another folder" in line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_full_disk(recipe_file: Path, small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 2_000_000)  # what is left holds no target
    line = refused(recipe_file, "--root", small_disk)
    assert "No space left on device; finished stages are kept: make room" in line
    assert not list(small_disk.rglob(".*.parquet*"))
    filler.unlink()
    assert gradmm("run", recipe_file, "--root", small_disk).status == 0


SLOW = ["--set", "generation.search.draws=4000"]


@pytest.fixture
def slow_run(recipe_file: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that takes seconds for each shard, in a process of its own, killed if the test does not end it."""
    command = [
        sys.executable,
        "-m",
        "gradmm.deployments.cli.main",
        "run",
        recipe_file,
        "--root",
        tmp_path / "root",
        *SLOW,
    ]
    # The session's server, not one more; and one thread, as this process has.
    environment = os.environ | {"PREFECT_API_URL": PREFECT_API_URL.value(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def wait_for_shards(root: Path, count: int, process: subprocess.Popen[str]) -> dict[Path, int]:
    """Waits until `count` shards are recorded as finished; returns them with their times of writing."""
    deadline = time.monotonic() + 120
    while len(list(root.glob("results/generation_shard/*"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {file: file.stat().st_mtime_ns for file in root.glob("stages/generation_shard/*.parquet")}


def test_a_run_whose_interrupt_is_lost_in_a_stage_stops_after_it(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generated(*given: Any) -> pd.DataFrame:
        with suppress(KeyboardInterrupt):  # as Prefect's bookkeeping may
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)  # the handler runs before the next instruction
        return generate(*given)

    with monkeypatch.context() as patched:
        patched.setattr("gradmm.generation.generation.generate", generated)
        stopped = gradmm("run", recipe_file, "--root", tmp_path)
    assert stopped.status == 130
    assert stopped.err.splitlines()[-1].startswith("gradmm: stopped; finished stages and shards are kept")
    assert len(list(tmp_path.glob("results/generation_shard/*"))) == 1
    assert gradmm("run", recipe_file, "--root", tmp_path).status == 0  # nobody asks it to stop


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_stopped_in_generation_goes_on_where_it_was(
    slow_run: subprocess.Popen[str], recipe_file: Path, tmp_path: Path, how: signal.Signals
) -> None:
    root, process = tmp_path / "root", slow_run
    finished = wait_for_shards(root, 1, process)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    if how != signal.SIGKILL:
        assert process.returncode == 130, said
        assert "gradmm: stopped; finished stages and shards are kept" in said
        assert "Traceback" not in said
    assert gradmm("run", recipe_file, "--root", root, *SLOW).status == 0
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    (run,) = root.glob("runs/*/run.json")
    record = RunRecord.model_validate_json(run.read_text())
    assert record.stage("generation").rows == 8
    assert record.stage("target_gradient").cached


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_error_raised_while_an_interruption_is_handled_does_not_hide_it(number: signal.Signals) -> None:
    def interrupted() -> None:
        try:
            signal.raise_signal(number)
        finally:
            raise ValueError("as Prefect does where a task is about to start")

    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        interrupted()
    with pytest.raises(ValueError, match="no signal"), stopped_by_signals():
        raise ValueError("no signal") from OSError()


def test_prefects_own_exception_for_a_signal_is_an_interruption_too() -> None:
    def terminated() -> None:
        try:
            raise TerminationSignal(signal.SIGTERM)
        except TerminationSignal:
            raise ValueError("Task run is not set")  # noqa: B904

    def timed_out() -> None:
        try:
            raise asyncio.CancelledError
        except asyncio.CancelledError as cancelled:
            raise TimeoutError from cancelled

    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        terminated()
    with pytest.raises(TimeoutError), stopped_by_signals():  # nobody has stopped the run
        timed_out()


def test_a_finished_run_prints_its_table(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    finished = gradmm("run", recipe_file, "--root", tmp_path / "root")
    assert finished.status == 0, finished.err
    for word in (
        "target_gradient",
        "mia_audit",
        "matching loss",
        "log-perplexity",
        "token passes per text",
        ", as a set ",
        "accuracy before",
        "as many real",
    ):
        assert word in finished.out
    assert "No privacy guarantee" in finished.out
    assert gradmm("run", recipe_file, "--root", tmp_path / "root").out.count(" cached ") == 9

    quiet = gradmm("run", recipe_file, "--root", tmp_path / "root", "--quiet")
    assert quiet.err == ""
    assert Path(quiet.out.strip()).parent == tmp_path / "root/runs"
    printed = gradmm("run", recipe_file, "--root", tmp_path / "root", "--json")
    assert "finetune_eval" in printed.err
    run = json.loads(printed.out)
    record = json.loads((Path(run["folder"]) / "run.json").read_text())
    assert run.items() >= {name: record[name] for name in ("run_id", "recipe", "guarantee", "versions")}.items()
    assert [stage["figures"] for stage in run["stages"]] == [stage["figures"] for stage in record["stages"]]


def test_recipes_lists_and_shows_them() -> None:
    listed = gradmm("recipes")
    assert listed.status == 0
    recipes, presets = listed.out.split("\npresets, for --preset:\n")
    assert {"demo", "sst2", "imdb"} <= {line.split()[0] for line in recipes.splitlines()}
    assert [line.split()[0] for line in presets.splitlines()] == ["paper", "rerank", "search", "zero-shot"]
    assert all(len(line) < 130 and "#" not in line for line in presets.splitlines())
    assert yaml.safe_load(gradmm("recipes", "--show", "demo").out)["name"] == "demo"


def test_a_recipe_is_shown_as_a_preset_and_then_set_make_it() -> None:
    changes = ["--preset", "paper", "--set", "generation.admm.rho=0.01"]
    shown = yaml.safe_load(gradmm("recipes", "--show", "demo", *changes).out)
    assert shown["generation"]["method"] == "admm"
    assert shown["generation"]["admm"]["rho"] == 0.01
    assert shown["generation"]["text_tokens"] == 14  # the recipe's
    without_a_recipe = gradmm("recipes", *changes)
    assert without_a_recipe.status == 2
    assert without_a_recipe.err == "gradmm: --preset: no recipe to change; add --show RECIPE\n"


def test_every_command_on_a_recipe_takes_a_preset(recipe_file: Path, tmp_path: Path) -> None:
    root = ["--root", tmp_path / "root"]
    small = ["generation.per_class=4", "loss_selection.per_class=3", "label_filter.enabled=false"]
    changes = [word for change in small for word in ("--set", change)]
    assert gradmm("run", recipe_file, "--preset", "zero-shot", *changes, *root).status == 0
    (run,) = (tmp_path / "root").glob("runs/*/run.json")
    record = RunRecord.model_validate_json(run.read_text())
    assert record.recipe.generation.search.draws == 1
    assert record.recipe.generation.per_class == 4
    # The text of five tokens was written, and read once with the suffix and the verbaliser.
    assert 10 < record.stage("generation").figures["token_passes_per_text"] < 30
    preset = tmp_path / "private.yaml"
    preset.write_text("privacy: {epsilon: 4, delta: 1.0e-5}")
    assert "passed" in gradmm("audit", recipe_file, "--preset", preset).out
    assert "spent: epsilon 0 of 4" in gradmm("privacy", recipe_file, "--preset", preset, *root).out


def test_privacy_lists_releases_and_says_what_the_next_one_may_cost(recipe_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert "its runs are not private" in gradmm("privacy", recipe_file, "--root", root).out
    private = ["--set", "privacy.epsilon=4", "--set", "privacy.delta=1e-5", "--root", root]
    before = gradmm("privacy", recipe_file, *private)
    assert before.status == 0
    assert "spent: epsilon 0 of 4" in before.out
    assert "is within the budget" in before.out
    values = json.loads(gradmm("privacy", recipe_file, *private, "--json").out)
    assert (values["releases"], values["spent_epsilon"], values["budget"]["epsilon"]) == ([], 0, 4)
    assert (values["next_release"]["epsilon"], values["refusal"]) == (4, None)
    assert not root.exists()  # asking leaves no trace

    assert gradmm("run", recipe_file, *private).status == 0
    after = gradmm("privacy", recipe_file, *private).out
    assert "spent: epsilon 4 of 4 at delta 1e-05 (add-or-remove), composed over 1 release\n" in after
    assert "next release: refused: privacy.budget_epsilon: this release would bring" in after
    values = json.loads(gradmm("privacy", recipe_file, *private, "--json").out)
    assert values["spent_epsilon"] == pytest.approx(4)
    assert values["refusal"].startswith("privacy.budget_epsilon: this release would bring")
    budget, entry, _ = map(json.loads, Path(values["ledger"]).read_text().splitlines())
    assert budget["budget"] == values["budget"] == {"epsilon": 4, "delta": 1e-5, "adjacency": "add-or-remove"}
    assert [release["id"] for release in values["releases"]] == [entry["id"]]
    checked = gradmm("check", recipe_file, *private, "--set", "privacy.ledger=copy").out
    assert "a new release is refused (privacy.budget_epsilon: this release would bring" in checked
    assert "(1 release so far)" in checked
    ignored = gradmm("privacy", recipe_file, *private, "--set", "privacy.budget_epsilon=8").out
    assert "spent: epsilon 4 of 4" in ignored

    other = gradmm("run", recipe_file, *private, "--set", "privacy.clipping_norm=2")
    assert other.status == 2
    assert "privacy.budget_epsilon: this release would bring the composed epsilon to" in other.err
    assert other.err.endswith("the data's owner can raise the budget by `gradmm privacy RECIPE --set-budget`\n")
    for wrong in ("0", "-1", "nan", "inf"):
        refused = gradmm("privacy", recipe_file, *private, f"--set-budget={wrong}")
        assert (refused.status, refused.out) == (2, "")
    raised = gradmm("privacy", recipe_file, *private, "--set-budget", "8").out
    assert "spent: epsilon 4 of 8 at delta 1e-05" in raised
    assert "within the budget" in raised
    assert gradmm("run", recipe_file, *private, "--set", "privacy.clipping_norm=2").status == 0


def test_the_budget_of_data_that_are_not_there_is_not_set(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--root", tmp_path / "root", "--set", "privacy.delta=1e-5", "--set", "data.path=elsewhere.csv"]
    for more in ([], ["--set-budget", "3"]):
        refused = gradmm("privacy", recipe_file, *words, *more)
        assert refused.status == 2
        assert "data.path: nothing at 'elsewhere.csv', so the ledger of these data is unknown" in refused.err
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("port", ["0", "-1", "99999"])
def test_a_port_that_no_server_can_have_is_refused(port: str) -> None:
    refused = gradmm("serve", "demo", f"--port={port}")
    assert refused.status == 2
    assert "--port" in refused.err
    assert "Traceback" not in refused.err


def test_a_budget_can_be_set_before_epsilon_is_decided(recipe_file: Path, tmp_path: Path) -> None:
    root = ["--root", tmp_path / "root"]
    refused = gradmm("privacy", recipe_file, *root, "--set-budget", "3")
    assert "privacy.declared_records: a budget needs a delta; set it, or privacy.delta" in refused.err
    at = ["--set", "privacy.delta=1e-5"]
    assert gradmm("privacy", recipe_file, *root, *at, "--set-budget", "3").status == 0
    shown = gradmm("privacy", recipe_file, *root).out
    assert "spent: epsilon 0 of 3 at delta 1e-05 (add-or-remove), composed over 0 releases" in shown
    assert "the recipe has no privacy.epsilon: its runs are not private" in shown
    values = json.loads(gradmm("privacy", recipe_file, *root, "--json").out)
    assert (values["budget"]["epsilon"], "next_release" in values) == (3, False)
    private = gradmm("privacy", recipe_file, *root, *at, "--set", "privacy.epsilon=4").out
    assert "next release: refused: privacy.budget_epsilon: this release would bring" in private


def test_a_damaged_ledger_stops_a_run_before_it_reads_data(recipe_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    private = ["--set", "privacy.epsilon=4", "--set", "privacy.delta=1e-5", "--root", root]
    assert gradmm("run", recipe_file, *private).status == 0
    (file,) = root.glob("ledger/*.jsonl")
    file.write_bytes(file.read_bytes().replace(b"tiny", b"tinx", 1))
    for command in ("run", "privacy"):
        finished = gradmm(command, recipe_file, *private)
        assert finished.status == 2
        assert "restore it from a backup" in finished.err


def test_audit_names_a_package_that_the_sampler_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp", None)
    discrete = "privacy={epsilon: 1.0, declared_records: 1000, sampler: discrete}"
    refused = gradmm("audit", "demo", "--set", discrete)
    assert refused.status == 2
    assert "privacy.sampler: opendp is not installed; pip install 'gradmm[discrete]'" in refused.err


def test_audit_prints_what_it_certifies_and_needs_an_epsilon(recipe_file: Path) -> None:
    finished = gradmm("audit", recipe_file, "--set", "privacy.epsilon=4", "--set", "privacy.delta=1e-5")
    assert finished.status == 0
    assert "lower bound on epsilon" in finished.out
    assert "standard deviation, by the claimed one" in finished.out
    assert "passed (a correct mechanism fails once in 206,612 times at most)" in finished.out
    without = gradmm("audit", recipe_file)
    assert without.status == 2
    assert "privacy.epsilon: the recipe has no epsilon to audit" in without.err


def test_an_audit_of_contamination_compares_train_with_test_rows_and_quotes_none(
    recipe_file: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = gradmm("audit", recipe_file, "--contamination", "--root", tmp_path)
    assert few.status == 2
    assert "contamination: 16 rows of two words and more are too few to compare" in few.err
    monkeypatch.setattr("gradmm.audits.contamination.MIN_ROWS", 16)
    finished = gradmm("audit", recipe_file, "--contamination", "--root", tmp_path)
    assert finished.status == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in finished.out.splitlines() if "│" in line]
    assert [row[1] for row in rows] == ["loss", "neighbours", "planted: loss", "planted: neighbours"]
    assert [row[2] for row in rows] == ["40 and 16"] * 2 + ["20 and 20"] * 2
    assert all(0 <= float(row[3]) <= 1 for row in rows)
    assert "sign that the model has read" in finished.out or "it may have read them" in finished.out
    texts = pd.concat(pd.read_parquet(file) for file in tiny_data.glob("*.parquet"))["text"]
    assert not [text for text in texts if text in finished.out + few.err]


def test_privacy_says_whether_a_probe_would_be_released(recipe_file: Path, tmp_path: Path) -> None:
    target = "target_gradient={space: public-subspace, centred: true, probe_share: 0.5, token_share: 0}"
    asked = ["privacy", recipe_file, "--root", tmp_path, "--set", target]
    for records, probe in ((800, ""), (8000, ", and class sums of a probe"), (80000, ", and a probe")):
        private = ["--set", f"privacy={{epsilon: 0.05, delta: 1e-5, declared_records: {records}}}"]
        assert f"(public-subspace, centred{probe}) is within the budget" in gradmm(*asked, *private).out


def test_an_audit_is_of_the_parts_that_would_be_released(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = []

    def audit(
        mechanism: GaussianMechanism, norms: ReleaseNorms, settings: MechanismAuditSettings, seed: int
    ) -> MechanismAudit:
        audited.append(norms)
        return mechanism_audit(mechanism, norms, settings, seed)

    monkeypatch.setattr("gradmm.audits.mechanism_audit.mechanism_audit", audit)
    private = ["--set", "privacy={epsilon: 0.05, delta: 1e-5, declared_records: 8000}"]
    for share, dimensions in ((0.5, "auto"), (0.5, 4), (0, "auto")):
        probe = f"target_gradient={{probe_share: {share}, token_share: 0, probe_dimensions: {dimensions}}}"
        assert gradmm("audit", recipe_file, *private, "--set", probe).status == 0
    assert audited == [
        ReleaseNorms.of(1.0, 0.5, class_sum_share=1.0),
        ReleaseNorms.of(1.0, 0.5),
        ReleaseNorms.of(1.0, 0.0),
    ]


def test_an_audit_that_fails_stops_the_run_before_it_reads_data(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradmm.tasks.runtime import inputs

    private = ["--set", "privacy.epsilon=1", "--set", "privacy.delta=1e-5", "--root", tmp_path / "root"]
    monkeypatch.setattr(GaussianMechanism, "noise", lambda self, shape: 1e-9 * np.random.randn(*shape))
    monkeypatch.setattr(inputs, "load_splits", lambda *_: pytest.fail("private data were read"))
    with pytest.raises(RuntimeError, match="the mechanism's audit failed twice: noise of gradient 0 is"):
        gradmm("run", recipe_file, *private)
    assert gradmm("audit", recipe_file, *private[:-2]).status == 1


def test_publish_refuses_what_is_no_release_and_what_has_no_guarantee(recipe_file: Path, tmp_path: Path) -> None:
    finished = gradmm("publish", tmp_path, "--repo", "acme/texts")
    assert finished.status == 2
    assert gradmm("run", recipe_file, "--root", tmp_path / "root").status == 0
    (folder,) = (tmp_path / "root" / "runs").iterdir()
    finished = gradmm("publish", folder, "--repo", "acme/texts")
    assert finished.status == 2
    assert "without-guarantee" in finished.err
    assert gradmm("publish", folder.name, "--root", tmp_path / "root", "--repo", "acme/texts").err == finished.err


def test_publish_refuses_a_card_that_leaves_out_later_releases(recipe_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    private = ["--set", "privacy={epsilon: 4.0, delta: 0.001, declared_records: 40, budget_epsilon: 99}"]
    assert gradmm("run", recipe_file, "--root", root, *private).status == 0
    (ledger,) = Ledger.all(root)
    (entry,) = ledger.entries()
    with ledger.charge(entry.release, Budget(epsilon=99, delta=0.001, adjacency="add-or-remove")) as finish:
        finish("ab" * 32)
    (folder,) = (root / "runs").iterdir()
    copy = tmp_path / "elsewhere" / "runs" / folder.name
    shutil.copytree(folder, copy)
    away = gradmm("publish", copy, "--repo", "acme/texts")
    assert "its card states 1 release, and the ledgers of" in away.err
    assert "have 0; run its recipe again" in away.err
    refused = gradmm("publish", folder, "--repo", "acme/texts")
    assert refused.status == gradmm("track", folder).status == 2
    assert refused.err in gradmm("track", folder).err
    assert f"its card states 1 release, and the ledgers of {root} have 2; run its recipe again" in refused.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["foo"], 'COMMAND: unknown command "foo"; see `gradmm --help`'),
        (["rum"], 'COMMAND: unknown command "rum"; did you mean "run"?'),
        (["run"], "run: parameter RECIPE requires an argument; see `gradmm run --help`"),
        (["run", "demo", "more"], "run: unexpected arguments: ['more']; see `gradmm run --help`"),
        (["run", "demo", "--verbos"], "run: unknown option: --verbos; did you mean --verbose?"),
        (["run", "demo", "--root"], "run: parameter --root requires an argument; see `gradmm run --help`"),
        (
            ["run", "demo", "--root", "nowhere://x"],
            "--root: 'nowhere://x' is neither a folder nor an object store",
        ),
        (["compare", "demo", "--seeds"], "compare: parameter --seeds requires at least 1 element"),
        (
            ["compare", "demo", "--seeds", "x"],
            'compare: invalid value for --seeds: unable to convert "x" into int',
        ),
        (["gradients", "demo", "--learning-rate", "0"], "--learning-rate: 0 is not a learning rate"),
        (["publish", "a"], "publish: parameter --repo requires an argument; see `gradmm publish --help`"),
        (["completion", "tcsh"], 'completion: invalid value "tcsh" for SHELL. Choose from: "bash", "zsh", "fish"'),
        (["recipes", "--set", "a=1"], "--set: no recipe to change; add --show RECIPE"),
        (["run", "demo", "--set", "a"], "--set: 'a' is not of the form a.b=value; for example seed=1"),
        (["run", "demo", "--set", "data.path.x=["], "--set data.path.x: '[' is not a YAML value; quote it"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2_and_one_line(words: list[str], line: str) -> None:
    finished = gradmm(*words)
    assert (finished.status, finished.out) == (2, "")
    assert finished.err.startswith(f"gradmm: {line}")
    assert len(finished.err.splitlines()) == 1


def test_several_values_follow_one_option(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[dict] = []
    monkeypatch.setattr(StudyOptions, "run", lambda *_, **plan: plans.append(plan))
    words = ["compare", "--sizes", "5", "10", "--arms", "random", "before", "--set", "seed=1", "demo"]
    assert gradmm(*words).status == 0
    assert plans == [{"sizes": (5, 10), "arms": ("random", "before"), "epsilons": ()}]


def test_help_and_version_are_printed() -> None:
    assert gradmm("--version").out == f"{version('gradmm')}\n"
    listed = gradmm("--help")
    assert listed.status == 0
    assert gradmm() == Finished(2, listed.out, "")  # a command is missing
    commands = {line.split()[1] for line in listed.out.splitlines() if line.startswith("│ ")} - {"│"}
    for command in COMMANDS:
        assert command in commands
        shown = gradmm(command, "--help")
        assert shown.status == 0
        assert f"Usage: gradmm {command} " in shown.out


COMMANDS = (
    *("run", "privacy", "audit", "recipes", "runs", "diff", "report", "clean", "publish", "track"),
    *("serve", "notify"),
    *("compare", "scarce", "transfer", "distribution", "gradients", "bounds", "epsilon", "ablate", "scale"),
)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_knows_commands_and_asks_for_names(shell: str, tmp_path: Path) -> None:
    script = gradmm("completion", shell).out
    assert all(command in script for command in COMMANDS)
    assert "without-guarantee" in script
    assert {"demo", "sst2"} <= set(gradmm("__complete", "run", "").out.split())
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_ctrl_c_while_commands_are_imported_ends_without_a_word() -> None:
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "cyclopts":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from gradmm.deployments.cli.entry import main
main()
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (-signal.SIGINT, "", "")


def test_a_root_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, line in (
        (
            "",
            "--root: '' is neither a folder nor an object store (it is empty); give a folder or s3://bucket/prefix",
        ),
        (str(tmp_path / "file"), f"{tmp_path / 'file'}: is a file; give a folder"),
    ):
        refused = gradmm("runs", "--root", place)
        assert (refused.status, refused.out) == (2, "")
        assert line in refused.err


@pytest.mark.parametrize("words", [["recipes"], ["recipes", "--show", "demo"], ["--help"]])
def test_a_pipe_without_a_reader_ends_a_command_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gradmm.deployments.cli.main", *words]
    finished = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (141, "")
