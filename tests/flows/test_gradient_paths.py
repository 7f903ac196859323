"""The flows `gradients` and `bounds` on a tiny model: both use the same measurement; bad arguments are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from gradmm.config.recipe import Recipe
from gradmm.data.splits import load_splits
from gradmm.deployments.cli.main import main
from gradmm.flows.studies.flows import REAL_SEED, bounds, gradients
from gradmm.storage.artifacts import Root
from gradmm.studies.arms import PRODUCT
from gradmm.studies.bounds import bounds_over_seeds
from gradmm.studies.gradients import gradients_over_seeds
from gradmm.studies.record import StudyRecord
from gradmm.tasks.runtime.inputs import drawn_rows, read_split
from gradmm.tasks.runtime.stage_task import RunContext, SplitReference

ARMS, SEEDS, STEPS = ["zero-shot", "random", PRODUCT], [0, 1, 2], [0, 2, 4]


@pytest.fixture
def recipe(tiny_recipe: Callable[..., Recipe]) -> Recipe:
    return tiny_recipe(finetune_eval={"seeds": SEEDS, "learning_rates": [1e-3, 1e-4], "steps": [4, 3]})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


def executed(record: StudyRecord) -> Counter[str]:
    """The stages that were not cached."""
    return Counter(stage.stage for stage in record.stages if not stage.cached)


def test_gradients_are_measured_once_for_both_studies(recipe: Recipe, root: Path) -> None:
    record = gradients(recipe, 1e-3, 4, 12, root)
    assert executed(record)["gradient_path"] == len(ARMS) * len(SEEDS)
    assert not executed(gradients(recipe, 1e-3, 4, 12, root))
    bounded = bounds(recipe, 1e-3, 4, 12, root)
    assert executed(bounded) == {"bounds": 1}
    paths = [stage.read() for stage in record.stages if stage.stage == "gradient_path"]
    rows = pd.concat(paths, ignore_index=True)
    runs = rows[["arm", "seed"]].drop_duplicates().to_numpy().tolist()
    assert runs == [[arm, seed] for arm in ARMS for seed in SEEDS]
    assert all(each["step"].unique().tolist() == STEPS for each in paths)
    constant = rows[["learning_rate", "steps", "real_rows", "size"]].drop_duplicates()
    assert constant.to_numpy().tolist() == [[1e-3, 4, 12, 6]]
    start = rows[rows["step"] == 0]
    assert start["real_loss"].nunique() == 1  # the same rows for all
    assert start.loc[start["arm"] == PRODUCT, "error"].nunique() == 6  # two parts, and a generation for each seed
    assert start.loc[start["arm"] == "random", "error"].nunique() == 6  # and a draw of rows for each
    for study, table in ((record, gradients_over_seeds(rows)), (bounded, bounds_over_seeds(rows))):
        pd.testing.assert_frame_equal(study.table.read(), table, check_dtype=False, check_like=True)
    for study, picture, line in (
        (record, "gradient_error", "| random, 6 texts | "),
        (bounded, "bounds", "| random | 4 | "),
    ):
        folder = root / "runs" / study.run_id
        assert {file.name for file in folder.iterdir()} == {
            "tables.md", "run.json", f"{picture}.svg", f"{picture}.png"
        }  # fmt: skip
        page = (folder / "tables.md").read_text()
        assert line in page
        assert "4 steps, learning rate 0.001 for every arm" in page
        assert "12 random train rows" in page
        assert "nan" not in page


def test_test_rows_and_other_schedules_do_not_change_a_path(recipe: Recipe, root: Path) -> None:
    other = {"max_test_rows": 3, "learning_rates": (1e-2,), "steps": (7,), "seeds": (0,)}
    settings = recipe.finetune_eval.model_copy(update=other)
    recipe = recipe.model_copy(update={"finetune_eval": settings})
    assert executed(gradients(recipe, 1e-3, 4, 12, root, ("random",))) == {"gradients": 1}
    assert executed(gradients(recipe, 1e-3, 4, 13, root, ("random",))) == {"gradient_path": 2, "gradients": 1}


def test_real_rows_are_balanced_and_differ_from_draws_of_the_arm_random(recipe: Recipe, tmp_path: Path) -> None:
    train = load_splits(recipe.data, (0, 1), recipe.seed).train
    context = RunContext(
        root=Root(path=tmp_path), recipe="tiny", data=recipe.data, labels=(0, 1), seed=recipe.seed, device="cpu"
    )
    whole = SplitReference(split="train", digest=train.digest, rows=len(train))
    real, *others = (read_split(context, drawn_rows(context, whole, 12, seed)) for seed in (REAL_SEED, *range(9)))
    assert Counter(real.labels) == {0: 6, 1: 6}
    assert all(set(real.texts) != set(other.texts) for other in others)


def test_the_commands_print_tables_and_refuse_bad_arguments(
    recipe: Recipe, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))

    def run(study: str, *arguments: str) -> tuple[int, str, str]:
        status = main([study, str(file), "--root", str(root), *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    status, out, _ = run(
        "bounds", "--real-rows", "12", "--learning-rate", "1e-3", "--steps", "4", "--arms", "random"
    )
    assert status == 0
    assert "| random | 4 |" in out
    status, out, _ = run("gradients", "--real-rows", "12", "--arms", "random", "--seeds", "0")
    assert status == 0
    assert "3 steps, learning rate 0.0001 for every arm" in out  # the lower of two
    assert "too few seeds" in out
    for arguments, line in (
        (["--arms", "before"], "--arms: before cannot have 6 texts; choose from zero-shot"),
        (["--arms", "nothing"], "--arms: no arm 'nothing'"),
        (["--learning-rate", "0"], "--learning-rate: 0 is not a learning rate"),
        (["--learning-rate", "nan"], "--learning-rate: nan is not a learning rate"),
        (["--steps", "0"], "--steps: 0 is not a number of steps"),
        (["--real-rows", "1"], "--real-rows: 1 leaves a class empty; ask for at least 2"),
        (["--set", "finetune_eval.lora_rank=2"], "finetune_eval.lora_rank: adapters have no gradients of all"),
    ):
        status, _, err = run("gradients", *arguments)
        assert status == 2
        (message,) = [text for text in err.splitlines() if text.startswith("gradmm: ")]
        assert line in message
