"""Finished runs: listed, compared, and their reports found. The runs are those of the tiny recipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gradmm.deployments.cli.history import ABSENT, Difference, PastRun, differences, find_run, past_runs
from gradmm.errors import InputError
from gradmm.lm.model_reference import ModelReference
from gradmm.outputs.record import RunRecord
from tests.flows.conftest import tiny_recipe_values
from tests.flows.test_cli import gradmm


@pytest.fixture(scope="module")
def history(tiny_data: Path, tiny_model: ModelReference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with three runs: one, the same again, and one with other settings of the last stages."""
    folder = tmp_path_factory.mktemp("history")
    recipe = folder / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe_values(tiny_data, tiny_model)))
    for changes in ([], [], ["--set", "mia_audit.runs=3", "--set", "finetune_eval.learning_rates=[1e-4, 3e-3]"]):
        finished = gradmm("run", recipe, "--root", folder / "root", *changes)
        assert finished.status == 0, finished.err
    return folder / "root"


@pytest.fixture
def root(history: Path, tmp_path: Path) -> Path:
    """A copy to spoil, at another place than that where the runs were made."""
    shutil.copytree(history, tmp_path / "root")
    return tmp_path / "root"


def runs_of(root: Path) -> list[PastRun]:
    runs, faults = past_runs(root)
    assert not faults
    return runs


def changed(run: PastRun, **values: object) -> None:
    """Writes other values into a run's run.json."""
    file = run.folder / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_runs_are_listed_newest_first(history: Path) -> None:
    finished = gradmm("runs", "--root", history)
    assert finished.status == 0
    assert finished.err == ""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.out.splitlines() if "│" in line]
    records = {
        file.parent.name: RunRecord.model_validate_json(file.read_text())
        for file in history.glob("runs/*/run.json")
    }
    assert [row[0] for row in rows] == sorted(records, reverse=True)
    assert [row[9] for row in rows] == ["7 of 9", "9 of 9", "0 of 9"]
    for name, recipe, started, _, epsilon, texts, before, synthetic, real, _ in rows:
        record = records[name]
        figures = record.stage("finetune_eval").figures
        assert (recipe, epsilon) == ("tiny", "none")
        assert started == f"{record.started:%Y-%m-%d %H:%M}"
        assert texts == str(record.stage("category_balance").figures["kept"])
        accuracies = [figures[f"accuracy_{arm}"] for arm in ("before", "synthetic", "real")]
        assert [before, synthetic, real] == [f"{accuracy:.3f}" for accuracy in accuracies]


def test_a_narrow_terminal_shows_whole_figures(history: Path) -> None:
    """80 columns, on a terminal of their own."""
    command = f"stty cols 80; {sys.executable} -m gradmm.deployments.cli.main runs --root {history}"
    shown = subprocess.run(["script", "-qec", command, "/dev/null"], capture_output=True, text=True, check=True)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in shown.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    for run in runs_of(history):
        (line,) = [line for line in lines if line.startswith(run.run_id + " ")]
        assert f" {run.figures('finetune_eval')['accuracy_real']:.3f} " in line
    assert "started" not in shown.stdout


def test_epsilon_of_a_private_run_is_shown_and_that_of_an_unsafe_one_is_not(root: Path) -> None:
    for run, safe in zip(runs_of(root), (True, False, True), strict=True):
        record = json.loads((run.folder / "run.json").read_text())
        changed(run, guarantee=record["guarantee"] | {"epsilon": 0.05, "safe": safe})
    rows = [line.split("│")[5].strip() for line in gradmm("runs", "--root", root).out.splitlines() if "│" in line]
    assert rows == ["0.05", "UNSAFE", "0.05"]


def test_what_is_no_run_is_told_in_a_line_and_skipped(root: Path) -> None:
    whole, no_json, no_record = runs_of(root)
    (root / "runs" / "holiday [red]pictures").mkdir()
    (root / "runs" / "notes.txt").touch()
    (no_json.folder / "run.json").write_bytes(b'{"run_id": "\xff')
    changed(no_record, seconds="for ever")
    finished = gradmm("runs", "--root", root)
    assert finished.status == 0
    assert whole.run_id in finished.out
    assert f"│ {no_json.run_id} " not in finished.out
    assert sorted(finished.err.splitlines()) == sorted(
        [
            f"gradmm: skipped {root}/runs/holiday [red]pictures: no run.json: not a finished run; "
            "run the recipe again",
            f"gradmm: skipped {no_json.folder}/run.json: damaged: not a JSON object; restore or remove it",
            f"gradmm: skipped {no_record.folder}/run.json: not a run's record (seconds is wrong); "
            "restore or remove it",
        ]
    )
    (root / "runs" / "list").mkdir()
    (root / "runs" / "list" / "run.json").write_text("[]")
    assert "list/run.json: damaged" in gradmm("runs", "--root", root).err


def test_a_root_without_runs(tmp_path: Path) -> None:
    finished = gradmm("runs", "--root", tmp_path / "nowhere")
    assert finished.status == 0
    assert finished.out == f"no runs under {tmp_path}/nowhere\n"
    assert not (tmp_path / "nowhere").exists()


def test_runs_of_another_version_with_other_settings_are_listed_and_compared(root: Path) -> None:
    run, same, _ = runs_of(root)
    changed(run, recipe=run.recipe | {"since_dropped": {"x": [1, {"y": None}]}}, versions={"gradmm": "0.0.9"})
    with pytest.raises(ValueError, match="since_dropped"):
        RunRecord.model_validate_json((run.folder / "run.json").read_text())
    run, same, _ = runs_of(root)
    found = differences(run, same)
    assert Difference("settings", "since_dropped.x.1.y", None, ABSENT) in found
    assert Difference("libraries", "gradmm", "0.0.9", "0.1.0") in found
    assert Difference("libraries", "torch", ABSENT, same.versions["torch"]) in found


def test_diff_says_what_was_set_otherwise_and_what_came_of_it(history: Path) -> None:
    newest, _, oldest = runs_of(history)
    found = {(d.group, d.name): (d.first, d.second) for d in differences(oldest, newest)}
    settings = {name: values for (group, name), values in found.items() if group == "settings"}
    assert settings == {"mia_audit.runs": (2, 3), "finetune_eval.learning_rates.1": (ABSENT, 3e-3)}
    assert {group for group, _ in found} == {"settings", "figures"}
    assert found["figures", "finetune_eval.rows"] == (10, 18)
    assert ("figures", "mia_audit.sha256") in found
    assert not [name for _, name in found if name.startswith(("generation", "category_balance"))]

    finished = gradmm("diff", oldest.run_id, newest.run_id, "--root", history)
    assert finished.status == 0
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in finished.out.splitlines() if "│" in line]
    assert ["settings", "finetune_eval.learning_rates.1", "–", "0.003"] in rows
    assert ["", "mia_audit.runs", "2", "3"] in rows
    digests = (oldest.stages[-2].sha256[:12], newest.stages[-2].sha256[:12])
    assert ["", "mia_audit.sha256", *digests] in rows
    assert [row[0] for row in rows if row[0]] == ["settings", "figures"]


def test_diff_of_equal_runs_says_so(history: Path) -> None:
    _, again, first = runs_of(history)
    assert differences(first, again) == []
    finished = gradmm("diff", first.folder, again.folder)
    assert finished.out == (
        f"{first.run_id} and {again.run_id}: the same settings, data, model, code, libraries and figures\n"
    )


def test_diff_sees_other_data_model_code_and_digits_however_small(root: Path) -> None:
    run, other, _ = runs_of(root)
    data, stages = json.loads((other.folder / "run.json").read_text())["data"], []
    for stage in other.stages:
        figures = stage.figures
        if "mean_matching_loss" in figures:
            figures = figures | {"mean_matching_loss": figures["mean_matching_loss"] * (1 + 1e-12)}
        if stage.stage == "generation":  # as an older version's, which has no record of the code
            os.truncate(str(other.stage_file(stage)), 0)
        stages.append(stage.model_copy(update={"figures": figures}).model_dump(mode="json"))
    data["train"]["digest"] = "0" * 64
    changed(other, data=data, model=other.model | {"digest": "1" * 64}, stages=stages)
    run, other = (find_run(r.run_id, root) for r in (run, other))
    # Both runs share the damaged file: what cannot be read is not compared.
    groups = {d.group: d for d in differences(run, other)}
    assert list(groups) == ["settings", "data", "model", "figures"]
    moved = root.parent / "elsewhere"
    shutil.copytree(root, moved)
    shutil.copy(str(run.stage_file(run.stages[0])), moved / "stages" / "generation" / other.stages[1].path.name)
    code = [d for d in differences(run, find_run(other.run_id, moved)) if d.group == "code"]
    assert [(d.name, d.first, d.second) for d in code] == [
        ("generation", ABSENT, run_code(run, "target_gradient")),
    ]
    printed = gradmm("diff", run.folder, other.folder).out
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert ["data", "train.digest", run.data["train"]["digest"][:12], "0" * 12] in rows
    (losses,) = [row[2:] for row in rows if row[1] == "generation.mean_matching_loss"]
    assert losses[0] != losses[1]


def run_code(run: PastRun, stage: str) -> str:
    """The code version that a stage's Parquet names, read without `gradmm.deployments.cli.history`."""
    import pyarrow.parquet as pq

    record = next(s for s in run.stages if s.stage == stage)
    return json.loads(pq.read_schema(run.stage_file(record)).metadata[b"gradmm"])["code"]


def test_scripts_read_runs_and_differences_as_json(history: Path) -> None:
    newest, _, oldest = runs_of(history)
    listed = json.loads(gradmm("runs", "--root", history, "--json").out)
    assert [run["run_id"] for run in listed] == [run.run_id for run in runs_of(history)]
    for run in listed:
        file = Path(run["folder"]) / "run.json"
        record = json.loads(file.read_text())
        assert {name: run[name] for name in ("recipe", "data", "guarantee")}.items() <= record.items()
        accuracies = [each["stages"][-3]["figures"]["accuracy_synthetic"] for each in (run, record)]
        assert accuracies[0] == accuracies[1]
    found = json.loads(gradmm("diff", oldest.run_id, newest.folder, "--root", history, "--json").out)
    assert [(d["group"], d["name"]) for d in found] == [(d.group, d.name) for d in differences(oldest, newest)]
    assert {"group": "settings", "name": "mia_audit.runs", "first": 2, "second": 3} in found
    assert {"group": "settings", "name": "finetune_eval.learning_rates.1", "second": 0.003} in found
    assert json.loads(gradmm("diff", newest.run_id, newest.run_id, "--root", history, "--json").out) == []
    assert gradmm("runs", "--root", history / "none", "--json").out == "[]\n"


def test_a_table_whose_reader_is_gone_ends_quietly(history: Path) -> None:
    """As in `gradmm runs | head -1`: head reads a line, and closes the pipe."""
    command = f"{sys.executable} -m gradmm.deployments.cli.main runs --root {history}"
    lines = f"{command} | true; echo ${{PIPESTATUS[0]}}; {command} | head -1; echo ${{PIPESTATUS[0]}}"
    finished = subprocess.run(["bash", "-c", lines], capture_output=True, text=True)
    never_read, title, begun = finished.stdout.splitlines()
    assert (never_read, title.split()[0], finished.stderr) == ("141", "runs", "")
    assert begun in ("0", "141")  # a short table fits the pipe before head closes it


def test_run_ids_complete(history: Path) -> None:
    ids = {run.run_id for run in runs_of(history)}
    completed = gradmm("__complete", "report", "--root", history, "").out
    assert ids <= {line.split("\t")[0] for line in completed.splitlines()}


def test_a_run_that_is_not_there(history: Path, tmp_path: Path) -> None:
    newest, _, _ = runs_of(history)
    wrong = newest.run_id.replace("tiny", "tinny")
    for command in (["diff", wrong, newest.run_id], ["diff", newest.run_id, wrong], ["report", wrong]):
        finished = gradmm(*command, "--root", history)
        assert finished.status == 2
        assert finished.err == f"gradmm: {history}: no run {wrong!r}; did you mean {newest.run_id!r}?\n"
    assert f"did you mean {newest.run_id!r}?" in gradmm("report", "tiny", "--root", history).err
    unlike = gradmm("report", "zzz", "--root", history).err
    assert unlike.endswith(f"no run 'zzz'; the newest is {newest.run_id!r}, `gradmm runs` lists all\n")
    for no_place in ("~nobody-such", "nowhere://bucket"):
        assert f": no run {no_place!r}; the newest is" in gradmm("report", no_place, "--root", history).err
    nothing = gradmm("report", "zzz", "--root", tmp_path).err
    assert nothing == f"gradmm: {tmp_path}: no run 'zzz', nor any other; give the --root of the run\n"


def test_report_prints_its_path(root: Path) -> None:
    run = runs_of(root)[0]
    finished = gradmm("report", run.run_id, "--root", root)
    assert (finished.status, finished.out) == (0, f"{run.report}\n")
    assert gradmm("report", run.folder).out == finished.out
    run.report.unlink()
    finished = gradmm("report", run.run_id, "--root", root)
    assert finished.status == 2
    assert finished.err == f"gradmm: {run.report}: is missing; run the recipe again: cached stages take seconds\n"
    with pytest.raises(InputError, match=r"no run\.json"):
        find_run(str(root), root)


def test_report_is_opened_in_the_users_browser(history: Path, tmp_path: Path) -> None:
    """In a process of its own: Python finds the browser once, by the environment variable BROWSER."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o700)
    run = runs_of(history)[0]
    command = [
        sys.executable,
        "-m",
        "gradmm.deployments.cli.main",
        "report",
        run.run_id,
        "--root",
        history,
        "--open",
    ]
    finished = subprocess.run(
        command, env=os.environ | {"BROWSER": f"{browser} %s"}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"{run.report}\n"
    assert (tmp_path / "opened").read_text() == f"{run.report.as_uri()}\n"


def test_listing_runs_starts_neither_prefect_nor_torch(history: Path) -> None:
    lines = (
        "import sys; from gradmm.deployments.cli.main import main; "
        f"main(['runs', '--root', {str(history)!r}]); "
        "print({'prefect', 'torch', 'pandas', 'matplotlib'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "set()"
