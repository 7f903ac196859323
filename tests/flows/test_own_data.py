"""From a user's own data to a release in two commands, `gradmm init` and `gradmm run`, with no file edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pandas as pd
import pytest
import yaml

from gradmm.config.loading import load_recipe
from gradmm.deployments.new_recipe import verbalisers
from gradmm.deployments.recipe_files import find_recipe
from gradmm.deployments.serving.recipe_deployment import parameters
from gradmm.errors import InputError
from gradmm.lm.model_reference import ModelReference
from tests.flows.conftest import BAD, GOOD
from tests.flows.test_cli import gradmm

REVIEWS = pd.DataFrame(
    [
        {"review": f"{text} {number}", "stars": stars}
        for number in range(10)
        for stars, texts in (("bad", BAD), ("good", GOOD))
        for text in texts
    ]
)

#: Small sizes, for time only.
SMALL = (
    "generation.per_class=6",
    "generation.text_tokens=6",
    "target_gradient.public_texts=20",
    "word_tilt.iterations=1",
    "word_tilt.texts=10",
    "finetune_eval.steps=4",
    "finetune_eval.seeds=[0]",
    "mia_audit={runs: 2, threshold_records: 3, test_records: 3}",
)


def as_csv(folder: Path) -> Path:
    REVIEWS.to_csv(folder / "reviews.csv", index=False)
    return folder / "reviews.csv"


def as_json_lines(folder: Path) -> Path:
    REVIEWS.to_json(folder / "reviews.jsonl", orient="records", lines=True)
    return folder / "reviews.jsonl"


def as_saved_data_set(folder: Path) -> Path:
    datasets.Dataset.from_pandas(REVIEWS).save_to_disk(str(folder / "reviews"))
    return folder / "reviews"


def as_on_the_hub(folder: Path) -> Path:
    (folder / "reviews" / "data").mkdir(parents=True)
    REVIEWS.to_parquet(folder / "reviews" / "data" / "train-00000-of-00001.parquet")
    return folder / "reviews"


@pytest.mark.parametrize("save", [as_csv, as_json_lines, as_saved_data_set, as_on_the_hub])
def test_two_commands_make_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: ModelReference, save: Callable[[Path], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = gradmm("init", save(tmp_path), "--model", tiny_model.name)
    assert made.status == 0, made.err
    assert "wrote reviews.yaml: 2 classes (bad, good), about 80 rows" in made.out

    checked = gradmm("check", "reviews.yaml", "--root", "root")
    assert checked.status == 0, checked.err
    assert "train        48 rows: bad " in checked.out
    assert "guarantee    none (privacy.epsilon is null)" in checked.out
    private = gradmm(
        "check",
        "reviews.yaml",
        "--root",
        "root",
        "--set",
        "privacy={epsilon: 1, delta: 1e-3, declared_records: 48}",
    )
    assert "release      WARNING: this release would be charged, but not be used" in private.out

    small = [word for setting in SMALL for word in ("--set", setting)]
    finished = gradmm("run", "reviews.yaml", "--root", "root", *small, "--json")
    assert finished.status == 0, finished.err
    release = Path("root") / "runs" / json.loads(finished.out)["run_id"] / "release"
    rows = datasets.load_dataset(str(release.resolve()), cache_dir=str(tmp_path / "cache"))["train"]
    assert rows.features["label"].names == ["bad", "good"]
    assert len(rows) == 12


@pytest.mark.parametrize(
    ("dtype", "slowdown", "warned"), [("bfloat16", 6.7, True), ("bfloat16", 1.2, False), ("float32", 6.7, False)]
)
def test_bfloat16_on_a_processor_without_it_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: ModelReference,
    dtype: str,
    slowdown: float,
    warned: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradmm.tasks.runtime.input_checks.bfloat16_slowdown", lambda: slowdown)
    assert gradmm("init", as_csv(tmp_path), "--model", tiny_model.name).status == 0
    checked = gradmm("check", "reviews.yaml", "--root", "root", "--set", f"model.dtype={dtype}")
    assert checked.status == 0, checked.err
    assert ("bfloat16 is about 7 times as slow as float32 on this processor" in checked.err) == warned


def test_a_recipe_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reviews.yaml").write_text("mine")
    assert "reviews.yaml: exists already; remove it" in gradmm("init", as_csv(tmp_path)).err
    assert (tmp_path / "reviews.yaml").read_text() == "mine"
    assert gradmm("init", as_csv(tmp_path), "--out", "other.yaml").status == 0
    nowhere = gradmm("init", as_csv(tmp_path), "--out", "nowhere/x.yaml")
    assert nowhere.status == 2
    assert "nowhere/x.yaml: cannot be written (No such file or directory); give another" in nowhere.err


@pytest.mark.parametrize(
    ("names", "verbalisers"),
    [
        (["Very good", "Very bad"], [" good", " bad"]),
        (["spam", "spam"], None),
        (["a_b", "a-b"], [" A", " B"]),
        (["Sports", "World"], [" sports", " world"]),
    ],
)
def test_verbalisers_differ_from_their_first_word_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], verbalisers: list[str] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"a text with words {i}", "label": names[i % 2]} for i in range(40)]
    pd.DataFrame(rows).to_csv("own.csv", index=False)
    made = gradmm("init", "own.csv")
    if verbalisers is None:
        assert "the column 'label' has 1 values; a label column has 2 to 50; name another label column" in made.err
        return
    recipe = yaml.safe_load(Path("own.yaml").read_text())
    by_name = {each["name"]: each["verbaliser"] for each in recipe["classes"]}
    assert [by_name[name] for name in sorted(names)] == [by_name[n] for n in sorted(names)]
    assert set(by_name.values()) == set(verbalisers)


@pytest.mark.parametrize("name", ["2023.csv", "2024-06-01.csv", "no.csv", "1e3.csv"])
@pytest.mark.parametrize(
    "label", ["pos\x9d", "a\x7fb", "a\x85b", "\ufeffa", "a\u2028b", "yes", "07:30", "a: b # c"]
)
def test_names_that_yaml_would_read_as_something_else_are_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, label: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"a text with words {i}", "label": ("other", label)[i % 2]} for i in range(40)]
    pd.DataFrame(rows).to_csv(name, index=False)
    made = gradmm("init", name, "--out", "own.yaml")
    assert made.status == 0, made.err
    recipe = yaml.safe_load(Path("own.yaml").read_text(encoding="utf-8"))
    assert recipe["name"] == name.removesuffix(".csv")
    assert set(recipe["data"]["label_names"]) == {"other", label}
    assert {each["name"] for each in recipe["classes"]} == {"other", label}


def test_rows_to_be_held_out_are_not_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gradmm("init", as_csv(tmp_path)).status == 0
    recipe = yaml.safe_load(Path("reviews.yaml").read_text())
    held_out = recipe["data"]["validation_rows"] + recipe["data"]["test_rows"]
    assert recipe["privacy"]["declared_records"] == len(REVIEWS) - held_out == 48


def test_check_lists_the_problems_of_data_and_model_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    as_csv(tmp_path)
    assert gradmm("init", "reviews.csv").status == 0
    broken = REVIEWS.assign(
        stars=["so-so", *REVIEWS["stars"][1:]], review=REVIEWS["review"].where(REVIEWS.index != 79)
    )
    broken.to_csv("reviews.csv", index=False)
    for command in ("check", "run"):
        finished = gradmm(command, "reviews.yaml", "--root", "root", "--set", "model.name=./nowhere")
        assert finished.status == 2
    checked = gradmm("check", "reviews.yaml", "--root", "root", "--set", "model.name=./nowhere")
    assert checked.status == 2
    lines = [line for line in checked.err.splitlines() if line.startswith("gradmm: ")]
    assert len(lines) == 3
    assert "reviews.csv: row 79 has an empty text" in lines[0]
    assert "reviews.csv: row 0 has a label that is not among data.label_names" in lines[1]
    assert "model.name: no folder './nowhere'" in lines[2]


def test_a_deployments_paths_do_not_depend_on_where_its_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reviews.csv").touch()
    Path("model").mkdir()
    values = load_recipe(find_recipe("sst2"), ["data={path: reviews.csv}", "model.name=./model"])
    deployed = parameters(values, tmp_path)
    assert deployed["data"]["path"] == str(tmp_path / "reviews.csv")
    assert deployed["model"]["name"] == str(tmp_path / "model")
    hub = parameters(load_recipe(find_recipe("sst2")), tmp_path)
    assert (hub["data"]["path"], hub["model"]["name"]) == (None, "microsoft/phi-1_5")


def test_an_unbalanced_quotation_mark_that_swallows_rows_of_a_tsv_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{row} lovely days out\t{row % 2}" for row in range(60)]
    for row in (7, 50):
        lines[row] = '"' + lines[row]
    Path("own.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")
    refused = gradmm("init", "own.tsv")
    assert refused.status == 2
    assert "row 7 holds other rows, from a quotation mark that is not doubled" in refused.err


@pytest.mark.parametrize("rows", [2, 3])
def test_too_few_rows_to_hold_any_out_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"text": [f"a day out, {row}" for row in range(rows)], "label": [0, 1, 1][:rows]})
    frame.to_csv("own.csv", index=False)
    refused = gradmm("init", "own.csv", "--text", "text", "--label", "label")
    assert (refused.status, len(refused.err.splitlines())) == (2, 1)
    assert f"{rows} rows leave {rows - 2} to train on, for 2 classes" in refused.err


def test_a_recipes_name_ends_in_yaml_and_letters_name_many_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(
        {"text": [f"a day out, {row}" for row in range(300)], "label": [r % 30 for r in range(300)]}
    )
    frame.to_csv("own.csv", index=False)
    assert "own: does not end in .yaml" in gradmm("init", "own.csv", "--out", "own").err
    assert gradmm("init", "own.csv", "--out", "our own.yaml").out.count("'our own.yaml'") == 2
    assert len(load_recipe(Path("our own.yaml")).classes) == 30


def test_texts_with_letters_outside_ascii_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    REVIEWS.assign(review="für " + REVIEWS["review"]).to_csv("own.csv", index=False)
    gradmm("init", "own.csv")
    assert load_recipe(Path("own.yaml")).generation.projection.language == "any"


def test_letters_stand_for_classes_whose_names_begin_alike_if_the_tokenizer_tells_them_apart() -> None:
    names = [f"topic {number}" for number in range(30)]

    def first_token(word: str) -> int:
        letter = word.strip()[0]
        return ord(letter) if letter.isalpha() else -1  # marks and digits are one token

    chosen = verbalisers(names, first_token)
    assert len({first_token(word) for word in chosen}) == 30
    with pytest.raises(InputError, match="does not tell 30 letters apart"):
        verbalisers(names, lambda word: 0)
