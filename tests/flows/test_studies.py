"""The studies `scarce`, `transfer`, `ablate`, `epsilon` and `distribution` on a tiny model."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from prefect import Flow
from transformers import PreTrainedTokenizerFast

from gradmm.config.loading import load_recipe
from gradmm.config.recipe import Recipe
from gradmm.data.splits import LabelledTexts, load_splits
from gradmm.deployments.cli.main import main
from gradmm.deployments.recipe_files import (
    default_ablations,
    find_ablations,
    find_preset,
    find_recipe,
    recipe_names,
)
from gradmm.errors import BudgetExhausted, InputError
from gradmm.evaluation.tfidf_classifier import evaluate_classifier
from gradmm.flows.studies.flows import (
    ablate,
    bounds,
    compare,
    distribution,
    epsilon,
    gradients,
    scale,
    scarce,
    transfer,
)
from gradmm.labelling.labelling import probability_matrix
from gradmm.privacy.ledger import Ledger
from gradmm.storage.artifacts import Root
from gradmm.studies.ablations import Ablation, check_ablations, read_ablations
from gradmm.studies.arms import CLASSIFIER, PRODUCT
from gradmm.studies.pages import study_page
from gradmm.studies.record import StudyRecord
from gradmm.tasks.runtime.inputs import drawn_rows, read_split
from gradmm.tasks.runtime.stage_task import RunContext, SplitReference
from tests.conftest import tiny_language_model

SEEDS = (0, 1)


@pytest.fixture
def recipe(tiny_recipe: Callable[..., Recipe]) -> Recipe:
    return tiny_recipe(
        finetune_eval={"seeds": list(SEEDS), "learning_rates": [1e-2], "steps": [2], "evaluate_every": 1}
    )


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One root for all studies, so that common stages run once."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def other_model(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_language_model(tokenizer, "llama", seed=1, dtype=torch.float32).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def executed(record: StudyRecord) -> Counter[str]:
    """The stages that were not cached."""
    return Counter(stage.stage for stage in record.stages if not stage.cached)


def check_folder(record: StudyRecord, root: Path) -> str:
    """Check the files of a study's folder; return its page."""
    folder = root / "runs" / record.run_id
    names = {file.suffix for file in folder.iterdir()}
    assert names == {".md", ".svg", ".png", ".json"}
    page = (folder / "tables.md").read_text()
    assert page == study_page(record)
    return page


@pytest.mark.parametrize(
    "study",
    [compare, scarce, transfer, ablate, scale, epsilon, distribution, gradients, bounds],
    ids=lambda f: f.name,
)
def test_worker_processes_can_get_a_copy_of_the_flow(study: Flow) -> None:
    assert cloudpickle.loads(cloudpickle.dumps(study)).name == study.name


def test_few_rows_are_balanced_nested_and_differ_between_seeds(recipe: Recipe, tmp_path: Path) -> None:
    train = load_splits(recipe.data, (0, 1), recipe.seed).train
    context = RunContext(
        root=Root(path=tmp_path), recipe="tiny", data=recipe.data, labels=(0, 1), seed=recipe.seed, device="cpu"
    )
    whole = SplitReference(split="train", digest=train.digest, rows=len(train))

    def drawn(rows: int, seed: int):
        reference = drawn_rows(context, whole, rows, seed)
        texts = read_split(context, reference)
        assert (reference.digest, reference.rows) == (texts.digest, len(texts))
        return texts

    five = drawn(5, 0)
    assert Counter(five.labels) == {0: 3, 1: 2}
    assert set(five.texts) < set(drawn(9, 0).texts) < set(train.texts)
    assert five == drawn(5, 0) != drawn(5, 1)
    assert drawn(1000, 0).digest != train.digest  # in another order
    assert sorted(drawn(1000, 0).texts) == sorted(train.texts)


def test_scarce_texts_come_from_the_few_rows_alone(recipe: Recipe, tmp_path: Path) -> None:
    record = scarce(recipe, tmp_path, (2, 5))
    assert not executed(scarce(recipe, tmp_path, (5, 2)))
    table = record.table.read()
    assert [*zip(table["arm"], table["size"], strict=True)] == [
        ("before", 0),
        ("calibrated model", 0),
        ("zero-shot", 6),
        ("real rows", 2),
        (PRODUCT, 2),
        ("real rows", 5),
        (PRODUCT, 5),
    ]
    assert table["seeds"].tolist() == [1, 1, *[len(SEEDS)] * 5]
    assert table.loc[table["arm"] == "real rows", "texts"].tolist() == [2, 5]
    assert (table.loc[table["arm"] == PRODUCT, "texts"] > 2).all()
    targets = [stage for stage in record.stages if stage.stage == "target_gradient"]
    used = Counter(int(sum(stage.figures["records"].values())) for stage in targets)
    # All rows only for zero-shot, which does not depend on them.
    assert used == {40: 1, 2: len(SEEDS), 5: len(SEEDS)}
    assert len({stage.sha256 for stage in targets}) == 1 + 2 * len(SEEDS)
    generations = [stage for stage in record.stages if stage.stage == "generation"]
    assert len({stage.sha256 for stage in generations}) == 3 * len(SEEDS)  # zero-shot and two sizes, by seed
    page = check_folder(record, tmp_path)
    assert "by the number of real rows" in page
    assert "| real rows |" in page
    against = re.findall(r"before fine-tuning: .+ \((against .+)\)$", page, re.MULTILINE)
    assert against == [f"against 5 real rows of {PRODUCT}"]
    assert re.search(r"^- calibrated model: .+\(against 5 real rows", page, re.MULTILINE)
    with_two, with_five = table.loc[table["arm"] == PRODUCT, "texts"]
    assert f"{PRODUCT} has {with_two:.0f}, {with_five:.0f} texts, a mean over seeds." in page


def test_transfer_fine_tunes_every_model_on_the_same_texts(
    recipe: Recipe, other_model: str, shared_root: Path
) -> None:
    record = transfer(recipe, (other_model,), shared_root)
    table = record.table.read()
    arms = ["before", "zero-shot", "random", "real-1k", PRODUCT]
    assert table.groupby("model", sort=False)["arm"].agg(list).to_dict() == {
        recipe.model.name: arms,
        other_model: arms,
        CLASSIFIER: arms[1:],
    }
    before = table[table["arm"] == "before"].set_index("model")["accuracy"]
    rows = [stage.read() for stage in record.stages if stage.stage == "arm_eval"]
    losses = [each["loss"][0] for each in rows if each["arm"][0] == "before"]
    assert len(set(losses)) == 2  # two models
    assert before.between(0, 1).all()
    assert f"### {other_model}" in check_folder(record, shared_root)
    assert not executed(transfer(recipe, (other_model,), shared_root))


def test_another_model_is_checked_before_any_text_is_made(
    recipe: Recipe, other_model: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(other_model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match=f"with {broken}: "):
        transfer(recipe, (str(broken),), tmp_path / "root")
    assert not (tmp_path / "root" / "stages").exists()


def test_too_few_test_rows_have_no_distances(recipe: Recipe, tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    test = pd.read_parquet(data / "test.parquet").sort_values("label")
    test.iloc[[0, 1, -1]].to_parquet(data / "test.parquet")
    changed = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": str(data)})})
    with pytest.raises(InputError, match="halves of 3 test rows have no distances; give at least 4"):
        distribution(changed, tmp_path / "root", ("random",))
    assert not (tmp_path / "root" / "stages" / "generation").exists()


def test_without_other_models_transfer_trains_the_recipes_and_the_classifier(
    recipe: Recipe, shared_root: Path, tiny_data: Path
) -> None:
    record = transfer(recipe, root=shared_root)
    table = record.table.read()
    assert table["model"].unique().tolist() == [recipe.model.name, CLASSIFIER]
    classified = table[table["model"] == CLASSIFIER].set_index("arm")
    assert (classified[["learning_rate", "steps"]] == 0).all(axis=None)
    assert (classified["seeds"] == len(SEEDS)).all()
    assert f"### {CLASSIFIER}" in check_folder(record, shared_root)
    # The real rows all at once: the texts of a class share words that those of the other lack.
    assert classified["accuracy"]["real-1k"] == 1
    splits = {name: pd.read_parquet(tiny_data / f"{name}.parquet") for name in ("validation", "test")}
    held_out = {
        name: LabelledTexts(tuple(rows["text"]), tuple(rows["label"].tolist())) for name, rows in splits.items()
    }
    (found,) = (
        stage
        for stage in record.stages
        if stage.stage == "tfidf_eval" and stage.read()[["arm", "seed"]].iloc[0].tolist() == [PRODUCT, SEEDS[-1]]
    )
    artifact = Root(path=shared_root).find_stage("tfidf_eval", found.path.stem)
    assert artifact is not None
    source = artifact.record()["upstream"]["made"]
    made = next(stage for stage in record.stages if stage.sha256 == source).read()
    expected, c = evaluate_classifier(
        PRODUCT, made["text"].tolist(), probability_matrix(made), (0, 1), held_out, seed=2
    )
    assert found.figures["C"] == c
    assert found.read()["accuracy"].tolist() == expected["accuracy"].tolist()
    assert found.read()["loss"].tolist() == pytest.approx(expected["loss"].tolist())


def test_ablations_are_the_recipe_with_other_settings(recipe: Recipe, shared_root: Path) -> None:
    ablations = (
        Ablation(name="no edits", settings={"generation": {"search": {"rounds": 0}}}),
        Ablation(name="no loss selection", unranked=True),
        Ablation(name="label rows", settings={"target_gradient": {"space": "label-rows"}}),
    )
    record = ablate(recipe, ablations, shared_root)
    table = record.table.read().set_index("arm")
    assert table.index.tolist() == ["before", PRODUCT, *(each.name for each in ablations)]
    assert table["token_passes"]["no edits"] < table["token_passes"][PRODUCT]
    assert table["matching_loss"]["no edits"] >= table["matching_loss"][PRODUCT]
    chosen = table.loc[[PRODUCT, "no loss selection"]]
    assert chosen["matching_loss"].nunique() == 1  # the same texts
    assert chosen["log_perplexity"].nunique() == 2  # another selection
    assert np.isnan(table["matching_loss"]["before"])
    targets = {stage.sha256 for stage in record.stages if stage.stage == "target_gradient"}
    assert len(targets) == 2
    assert "| label rows |" in check_folder(record, shared_root)
    assert not executed(ablate(recipe, ablations, shared_root))


def test_ablations_that_the_budget_does_not_allow_are_refused_before_the_first_release(
    recipe: Recipe, tmp_path: Path
) -> None:
    privacy = recipe.privacy.model_copy(update={"epsilon": 1.0, "delta": 1e-5, "budget_epsilon": 1.2})
    ablations = (
        Ablation(name="no edits", settings={"generation": {"search": {"rounds": 0}}}),
        Ablation(name="label rows", settings={"target_gradient": {"space": "label-rows"}}),
    )
    with pytest.raises(BudgetExhausted, match=r"these 2 releases .* above the budget of 1\.2 \(0 releases"):
        ablate(recipe.model_copy(update={"privacy": privacy}), ablations, tmp_path)
    assert not list(tmp_path.glob("stages/*/*"))


def test_smaller_numbers_of_texts_are_the_first_of_the_largest(recipe: Recipe, tmp_path: Path) -> None:
    record = scale(recipe, tmp_path, sizes=(6, 2, 42), methods=("written",))
    table = record.table.read()
    assert table.groupby("arm", sort=False)["size"].agg(list).to_dict() == {
        "before": [0],
        PRODUCT: [2, 6, 42],
        "written": [2, 6, 42],
        "random": [2, 6],  # train has 40 rows
    }
    methods = table.set_index("arm")["method"]
    assert methods[PRODUCT].unique().tolist() == ["search"]
    assert methods["random"].isna().all()
    passes = table.set_index("arm")["token_passes"]
    assert passes["written"].max() < passes[PRODUCT].min()
    assert {arm for arm, stages in record.making_seconds.items() if "generation" in stages} == {PRODUCT, "written"}
    made = {stage.rows for stage in record.stages if stage.stage == "generation"}
    assert made == {42}
    assert len({stage.sha256 for stage in record.stages if stage.stage == "target_gradient"}) == 1
    page = check_folder(record, tmp_path)
    assert "- written: 42 texts in " in page
    again = scale(recipe, tmp_path, sizes=(2, 6, 42), methods=("written",))
    assert not executed(again)
    assert again.making_seconds == {}
    # A generation has no time if some of its shards were cached.
    for merged in tmp_path.glob("stages/generation/*.parquet"):
        merged.unlink()
    resumed = scale(recipe, tmp_path, sizes=(2, 6, 42), methods=("written",))
    assert not {arm for arm, stages in resumed.making_seconds.items() if "generation" in stages}


def test_the_bundled_ablations_apply_to_the_bundled_recipes() -> None:
    for preset in (None, find_preset("search")):
        for name in recipe_names():
            recipe = load_recipe(find_recipe(name), preset=preset)
            for file in (default_ablations(recipe.generation.method), find_ablations("methods")):
                ablations = read_ablations(file)
                assert len(ablations) > 6
                check_ablations(recipe, ablations)
    assert [each.name for each in read_ablations(find_ablations("search"), ["no edits"])] == ["no edits"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("name: x", "is not a list of settings"),
        ("- settings: {}", "0.name: field required"),
        ("- {name: x, setting: {}}", "0.setting: extra inputs are not permitted"),
        ("- {name: gradmm}", "the name is taken"),
        ("- {name: x}\n- {name: x}", "the name is taken"),
        ("- {name: x, settings: {generation: {round: 1}}}", "unknown setting 'generation.round'"),
    ],
)
def test_bad_ablations_are_refused_in_one_line(recipe: Recipe, tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "ablations.yaml"
    file.write_text(content)
    with pytest.raises(InputError, match=line):
        check_ablations(recipe, read_ablations(file))


def test_each_epsilon_is_one_release_and_a_larger_one_preserves_more_of_the_target(
    recipe: Recipe, tmp_path: Path
) -> None:
    privacy = recipe.privacy.model_copy(update={"delta": 1e-5, "budget_epsilon": 5000.0})
    recipe = recipe.model_copy(update={"privacy": privacy})
    record = epsilon(recipe, tmp_path, (1.0, 1000.0))
    table = record.table.read().set_index("arm")
    weak, strong = (f"{PRODUCT}, epsilon {each}" for each in ("1000", "1"))
    assert table["epsilon"].dropna().to_dict() == {strong: 1.0, weak: 1000.0}
    assert -1 <= table["target_cosine"][strong] < table["target_cosine"][weak] <= 1
    assert table["target_cosine"].count() == 2
    assert set(record.guarantees) == {strong, weak}
    assert record.guarantee.epsilon is None
    assert len(Ledger.of(tmp_path, recipe.ledger).entries()) == 2
    assert "outside of the guarantee" in check_folder(record, tmp_path)
    again = executed(epsilon(recipe, tmp_path, (1000.0, 1.0)))
    assert again == {"mechanism_audit": 2}  # never cached


def test_distances_have_their_intervals_and_the_means_of_the_comparison(recipe: Recipe, shared_root: Path) -> None:
    record = distribution(recipe, shared_root, ("zero-shot", "random", "real-1k", "all rows"))
    table = record.table.read().set_index("arm")
    assert table.index.tolist() == ["zero-shot", "random", PRODUCT]  # the others have another size
    assert (table["half"] == table["texts"] // 2).all()
    for measure in ("frechet_distance", "squared_mmd", "nearest_distance"):
        assert (table[f"{measure}_low"] < table[f"{measure}_high"]).all()
    measured = [stage.read() for stage in record.stages if stage.stage == "arm_measures"]
    for rows in measured:
        assert table["frechet_distance"][rows["arm"][0]] == pytest.approx(rows["frechet_distance"].mean())
    assert "random halves" in check_folder(record, shared_root)


def test_the_commands_run_and_refuse_bad_arguments(
    recipe: Recipe, shared_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))

    def run(study: str, *arguments: str) -> tuple[int, str, str]:
        status = main([study, str(file), "--root", str(shared_root), *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    status, out, _ = run("distribution", "--arms", "random", "--seeds", "0")
    assert status == 0
    assert "| random |" in out
    assert "`gradmm distribution " in out
    for arguments, line in (
        (["scarce", "--rows", "1"], "--rows: [1] leaves a class empty; ask for at least 2"),
        (["scarce", "--rows", "4", "1000"], "--rows: 1,000 rows, as evenly over the classes as possible, are 40"),
        (["scarce", "--set", "privacy.epsilon=1", "--set", "privacy.delta=1e-5"], "privacy.epsilon: the draw"),
        (["transfer", "--models", recipe.model.name], "is repeated"),
        (["transfer", "--models", "x", "--arms", "y"], "--arms: no arm 'y'"),
        (["ablate", "--only", "y"], "--only: no ablation 'y'; choose from"),
        (
            ["ablate", "--ablations", "none.yaml"],
            "give the path of a list of ablations, or one of methods",
        ),
        (["scale", "--sizes", "1"], "--sizes: [1] leaves a class empty; ask for at least 2"),
        (["scale", "--sizes", "4", "--methods", "guess"], "generation.method"),
        (["epsilon"], "privacy: epsilon requires privacy.delta or privacy.declared_records"),
        (["distribution", "--arms", "y"], "--arms: no arm 'y'"),
        (["distribution", "--arms", "epsvec"], "--arms: no arm 'epsvec'; choose from before, "),
        (["scarce", "--rows", "6"], "--rows: 6 is also the number of texts"),
    ):
        status, _, err = run(*arguments)
        assert status == 2
        (message,) = [text for text in err.splitlines() if text.startswith("gradmm: ")]
        assert line in message
