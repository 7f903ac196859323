"""The comparison on a tiny model: its results, what it reuses from a run, and how it resumes after a stop."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from prefect import get_client
from prefect.client.schemas.sorting import FlowRunSort

from gradmm.config.loading import validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.data.examples import Examples, class_counts
from gradmm.data.splits import LabelledTexts, load_splits
from gradmm.deployments.cli.history import past_runs
from gradmm.deployments.cli.main import main
from gradmm.errors import BudgetExhausted, InputError
from gradmm.evaluation.finetune_eval import Finetuning
from gradmm.evaluation.schedule import Schedule
from gradmm.flows.distil import distil
from gradmm.flows.studies.flows import compare
from gradmm.flows.studies.study import Variant
from gradmm.outputs.record import StageRecord
from gradmm.privacy.ledger import Ledger, composed_epsilon
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals.class_shares import with_class_shares
from gradmm.rivals.private_evolution import noisy_votes
from gradmm.rivals.releases import read_records
from gradmm.storage.artifacts import Root
from gradmm.studies.arms import ARMS, PRODUCT
from gradmm.studies.measures import TextReader, text_measures
from gradmm.studies.pages import study_page
from gradmm.studies.record import StudyRecord
from gradmm.tasks.runtime.arm_texts import ArmTexts
from gradmm.tasks.runtime.stage_task import RunContext, SplitReference
from tests.flows.test_distil import run
from tests.flows.test_privacy import SPACE

SIZES, SEEDS = (2, 5), (0, 1, 2)

#: Arms of the model itself.
UNTRAINED = ["before", "calibrated model"]

#: Arms with sizes.
EVALUATED = [name for name in ARMS if name not in (*UNTRAINED, "real-100", "real-1k", "all rows")]

#: Public examples for few-shot; the label filter itself stays off.
EXEMPLARS = [{"text": "a warm room", "label": 1}, {"text": "a cold room", "label": 0}]


@pytest.fixture
def recipe(tiny_recipe: Callable[..., Recipe]) -> Recipe:
    return tiny_recipe(
        label_filter={"exemplars": EXEMPLARS},
        finetune_eval={"seeds": list(SEEDS), "learning_rates": [1e-4, 1e-2], "steps": [1, 2], "evaluate_every": 1},
    )


def with_seeds(recipe: Recipe, *seeds: int) -> Recipe:
    evaluation = recipe.finetune_eval.model_copy(update={"seeds": seeds})
    return recipe.model_copy(update={"finetune_eval": evaluation})


@pytest.fixture(scope="module")
def first_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture
def root(first_root: Path, recipe: Recipe) -> Path:
    """A root with a finished comparison, always at the same path, as references are absolute."""
    pristine = first_root.with_name("pristine-compare")
    if not pristine.exists():
        compare(recipe, first_root, SIZES)
        shutil.copytree(first_root, pristine)
    shutil.rmtree(first_root)
    shutil.copytree(pristine, first_root)
    return first_root


def executed(record: StudyRecord) -> Counter[str]:
    """The stages that were not cached."""
    return Counter(stage.stage for stage in record.stages if not stage.cached)


def stages(record: StudyRecord, name: str) -> list[StageRecord]:
    return [stage for stage in record.stages if stage.stage == name]


def texts_of(record: StudyRecord, stage: str) -> set[tuple[str, ...]]:
    """The different sets of texts that a stage wrote."""
    return {tuple(artifact.read()["text"]) for artifact in stages(record, stage)}


def test_every_arm_is_there_at_every_size_and_a_second_comparison_only_reads(root: Path, recipe: Recipe) -> None:
    record = compare(recipe, root, SIZES)
    assert not executed(record)
    table = record.table.read()
    expected = [(name, size) for name, arm in ARMS.items() for size in arm.sizes(SIZES, 40)]
    assert [*zip(table["arm"], table["size"], strict=True)] == expected
    assert (record.arms, record.sizes, record.seeds) == (tuple(ARMS), SIZES, SEEDS)
    assert record.commit
    with get_client(sync_client=True) as client:
        (latest,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
    assert re.fullmatch(r"compare tiny \d{4}-\d\d-\d\d \d\d:\d\d", latest.name)
    # One target for all arms.
    assert len(list(root.glob("stages/target_gradient/*"))) == 1
    (first, second), faults = past_runs(root)
    assert not faults
    assert first.run_id == record.run_id
    assert second.run_id.endswith("-tiny-compare")
    assert first.report.name == "tables.md"
    # Eight arms of two sizes with three seeds, real rows of three sizes with three, and two of the model itself.
    assert len(stages(record, "arm_eval")) == 8 * 2 * 3 + 3 * 3 + 2
    ends = table.set_index("arm").loc[["before", "all rows"]]
    assert ends[["size", "texts"]].to_numpy().tolist() == [[0, 0], [40, 40]]
    before, ceiling = ends["accuracy"]
    if ceiling > before:
        recovered = (table["accuracy"] - before) / (ceiling - before)
        assert table["gap_recovered"].tolist() == pytest.approx(recovered.tolist())
    else:
        assert table["gap_recovered"].isna().all()


def test_a_run_shows_the_comparison_of_its_settings_in_its_report(root: Path, recipe: Recipe) -> None:
    evaluated_otherwise = with_seeds(recipe, *SEEDS[:2])
    record = run(evaluated_otherwise, root)
    (compared,) = root.glob("runs/*-compare")
    report = (root / "runs" / record.run_id / "report.html").read_text()
    assert f"in the comparison <code>{compared.name}</code>" in report
    assert '<th scope="row">soft zero-shot</th>' in report
    changed = recipe.model_copy(update={"word_tilt": recipe.word_tilt.model_copy(update={"strength": 0.5})})
    record = run(changed, root)
    assert "in the comparison" not in (root / "runs" / record.run_id / "report.html").read_text()


def test_figures_are_those_of_the_fine_tunings(root: Path, recipe: Recipe) -> None:
    record = compare(recipe, root, SIZES)
    rows = pd.concat([stage.read() for stage in stages(record, "arm_eval")])
    rows["schedule"] = [*zip(rows["learning_rate"], rows["steps"], strict=True)]
    searched = rows.groupby(["arm", "size", "seed"])["schedule"].nunique().unstack("seed")
    assert (searched.drop(index=UNTRAINED)[0] == 4).all()  # tried by the first seed for all
    assert (searched.drop(index=UNTRAINED)[[1, 2]] == 1).all(axis=None)
    table = record.table.read().set_index(["arm", "size"])
    for _, own in rows.groupby(["arm", "size"]):
        arm, size = own[["arm", "size"]].iloc[0]
        chosen = tuple(table.loc[(arm, size), ["learning_rate", "steps"]])
        assert set(own.loc[own["seed"] > 0, "schedule"]) <= {chosen}
        assert chosen in set(own["schedule"])
        accuracies = own.loc[own["split"] == "test", "accuracy"]
        assert accuracies.min() <= table.loc[(arm, size), "accuracy"] <= accuracies.max()
        assert table.loc[(arm, size), "texts"] == own.drop_duplicates("seed")["texts"].mean()
        if ARMS[arm].private_rows:
            assert own["texts"].unique().tolist() == [min(size, 40)]
    measured = pd.concat([stage.read() for stage in stages(record, "arm_measures")])
    assert table.loc[("random", 5), "log_perplexity"] == pytest.approx(
        measured.loc[(measured["arm"] == "random") & (measured["size"] == 5), "log_perplexity"].mean()
    )
    assert measured.groupby(["arm", "size"])["log_perplexity"].nunique()["random", 5] == 3  # a draw per seed
    assert measured.groupby(["arm", "size"])["log_perplexity"].nunique()[PRODUCT, 5] == 3  # a generation per seed
    assert measured.groupby(["arm", "size"])["log_perplexity"].nunique()["herding", 5] == 1
    assert np.isfinite(measured["frechet_distance"]).all()


def test_fitting_the_words_is_part_of_a_texts_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(rows=10, figures={"token_passes_per_text": 7.0})
    variant = Variant(*[None] * 2, SimpleNamespace(model_copy=lambda **_: None), None, (3, 4))  # pyright: ignore
    variant.__dict__["generated"] = {3: made}
    words = SimpleNamespace(figures={"token_passes": 100.0})
    monkeypatch.setattr("gradmm.flows.studies.study.fitted_words", lambda *_: words)
    assert variant.passes_per_text == 17.0
    monkeypatch.setattr("gradmm.flows.studies.study.fitted_words", lambda *_: None)
    assert variant.passes_per_text == 7.0


def test_rerank_costs_as_many_passes_as_the_product(root: Path, recipe: Recipe) -> None:
    record = compare(recipe, root, SIZES, ("rerank",))
    made = stages(record, "generation")
    passes = {stage.sha256: stage.figures["token_passes_per_text"] for stage in made}
    assert len(passes) == len(made) == 3 + 2 + 3  # the product, two trials, and rerank
    one, two = sorted(passes.values())[:2]
    product, rerank = made[0].figures["token_passes_per_text"], made[-1].figures["token_passes_per_text"]
    assert rerank == pytest.approx(product, abs=0.51 * (two - one) + 0.2 * one)
    assert rerank > 5 * one


def test_baselines_write_other_texts(root: Path, recipe: Recipe) -> None:
    record = compare(recipe, root, SIZES, ("zero-shot", "few-shot"))
    texts = [set(stage.read()["text"]) for stage in stages(record, "generation")]
    assert [len(each) for each in texts] == [8] * 3 * 3  # three arms, three seeds
    assert all(len(a & b) < 4 for i, a in enumerate(texts) for b in texts[:i])


def test_a_comparison_after_a_run_repeats_no_stage(recipe: Recipe, tmp_path: Path) -> None:
    blocks = {name: getattr(recipe, name) for name in Recipe.model_fields}
    distil(**blocks, root=tmp_path)
    (first, *_) = recipe.finetune_eval.seeds
    assert first == recipe.seed
    record = compare(with_seeds(recipe, first), tmp_path, (2,), ("before",))
    assert set(executed(record)) == {"arm_eval", "arm_measures", "compare"}


def test_another_seed_or_size_runs_only_what_is_new(
    root: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    arms = ("before", "real-1k", "random", "zero-shot", "soft zero-shot")
    record = compare(with_seeds(recipe, *SEEDS, 3), root, SIZES, arms)
    assert "real-1k has 960 texts fewer than 1000" in caplog.text
    # zero-shot and soft zero-shot differ in their labels alone.
    texts = dict.fromkeys(("generation", "label_filter", "loss_selection", "category_balance"), 2) | {
        "labelling": 3
    }
    assert executed(record) == {"arm_eval": 4 * 2 + 1, "arm_measures": 5, "compare": 1} | texts
    record = compare(recipe, root, (*SIZES, 4), arms)
    assert executed(record) == {"arm_eval": 4 * 3, "arm_measures": 4, "compare": 1}


def test_a_stopped_comparison_resumes_where_it_was(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, began = ("random", "zero-shot"), []
    whole = Finetuning.checkpoints

    def stopped(self: Finetuning, examples: Examples, schedule: Schedule, seed: int, description: str):
        began.append(description)
        if len(began) == 13:
            raise KeyboardInterrupt
        return whole(self, examples, schedule, seed, description)

    monkeypatch.setattr(Finetuning, "checkpoints", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare(recipe, tmp_path, (2,), arms)
    monkeypatch.undo()
    # Each arm finished its first seed: four trainings, for two rates and two numbers of steps.
    finished = len(list(tmp_path.glob("stages/arm_eval/*.parquet")))
    assert finished == 3
    assert not list(tmp_path.glob("runs/*"))
    record = compare(recipe, tmp_path, (2,), arms)
    assert executed(record) == {"arm_eval": 3 * 3 - finished, "arm_measures": 3, "compare": 1}


def test_a_guarantee_adds_one_release_and_one_arm(root: Path, recipe: Recipe) -> None:
    recipe = recipe.model_copy(update={"privacy": recipe.privacy.model_copy(update={"delta": 1e-5})})
    for _ in range(2):  # the second run draws no noise
        record = compare(recipe, root, (2,), ("random",), (1.0,))
        assert record.arms == ("random", PRODUCT, f"{PRODUCT}, epsilon 1")
        assert record.guarantees[f"{PRODUCT}, epsilon 1"].epsilon == 1.0
        assert record.guarantee.epsilon is None
        assert len(Ledger.of(root, recipe.ledger).entries()) == 1
    assert executed(record) == {"mechanism_audit": 1}  # never cached
    table = record.table.read().set_index("arm")
    assert table["verdict"].notna().to_dict() == {"random": True, PRODUCT: False, f"{PRODUCT}, epsilon 1": True}


def test_an_insufficient_budget_is_refused_before_anything_is_computed(recipe: Recipe, tmp_path: Path) -> None:
    recipe = recipe.model_copy(update={"privacy": recipe.privacy.model_copy(update={"delta": 1e-5})})
    with pytest.raises(BudgetExhausted, match=r"these 2 releases .* above the budget of 1 \(0 releases so far\)"):
        compare(recipe, tmp_path, (2,), ("random",), (1.0, 1.5))
    assert not list(tmp_path.glob("stages/*/*"))
    assert Ledger.of(tmp_path, recipe.ledger).entries() == []


def test_no_text_of_the_private_rows_is_kept(root: Path, recipe: Recipe, tiny_data: Path) -> None:
    kept = b"".join(
        file.read_bytes()
        for folder in ("runs", "stages/coresets", "stages/arm_eval", "stages/arm_measures", "stages/compare")
        for file in root.glob(f"{folder}/**/*")
        if file.is_file()
    )
    assert kept
    for text in pd.read_parquet(tiny_data / "train.parquet")["text"]:
        assert text.encode() not in kept
    (file,) = root.glob("stages/coresets/*.parquet")
    assert pd.read_parquet(file).columns.tolist() == ["method", "label", "rank", "row"]


def test_arms_of_real_rows_take_rows_of_the_train_split(root: Path, recipe: Recipe) -> None:
    train = load_splits(recipe.data, (0, 1), recipe.seed).train
    context = RunContext(
        root=Root(path=root), recipe="tiny", data=recipe.data, labels=(0, 1), seed=recipe.seed, device="cpu"
    )
    reference = SplitReference(split="train", digest=train.digest, rows=len(train))
    (file,) = root.glob("stages/coresets/*.parquet")
    selected = Root(path=root).find_stage("coresets", file.stem)
    assert selected is not None
    rows = selected.read()

    def texts(arm: str, size: int, seed: int) -> LabelledTexts:
        made = selected if ARMS[arm].source == "coreset" else None
        return ArmTexts(context, ARMS[arm], made, reference).of(class_counts(size, (0, 1)), seed)

    for method in ("herding", "k-center"):
        of_method = rows[rows["method"] == method]
        chosen = [
            *of_method.query("label == 0 and rank <= 3")["row"],
            *of_method.query("label == 1 and rank <= 2")["row"],
        ]
        assert texts(method, 5, 0) == texts(method, 5, 1) == train.take(chosen)
        assert Counter(texts(method, 5, 0).labels) == {0: 3, 1: 2}
    drawn = [texts("random", 6, seed) for seed in (0, 1)]
    assert drawn[0] != drawn[1]
    assert all(Counter(each.labels) == {0: 3, 1: 3} for each in drawn)
    assert set(drawn[0].texts) <= set(train.texts)
    assert set(texts("random", 2, 0).texts) < set(drawn[0].texts)
    assert Counter(texts("real-1k", 1000, 0).labels) == Counter(train.labels)
    everything = ArmTexts(context, ARMS["all rows"], None, reference).of(Counter(train.labels), 0)
    assert sorted(everything.texts) == sorted(train.texts)


def test_the_command_prints_the_table_and_refuses_bad_arguments(
    recipe: Recipe, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["compare", str(file), "--root", str(root), *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    status, out, _ = run("--sizes", "5", "2", "--seeds", "0", "1", "2", "--arms", "random")
    assert status == 0
    assert "| random |" in out
    assert "| gradmm |" in out
    assert "gradmm compare " in out
    assert "--arms random`" in out
    for arguments, line in (
        (["--sizes", "7"], "--sizes: 7 texts of 2 classes exceed the 3 of a class that the recipe keeps"),
        (["--arms", "coresets"], "--arms: no arm 'coresets'; choose from before"),
        (["--seeds", "-1"], "finetune_eval.seeds"),
        (["--epsilon", "1"], "privacy: epsilon requires privacy.delta or privacy.declared_records"),
    ):
        status, _, err = run(*arguments)
        assert status == 2
        (message,) = [text for text in err.splitlines() if text.startswith("gradmm: ")]
        assert line in message


@pytest.fixture
def rival_recipe(recipe: Recipe) -> Recipe:
    """With features, and a budget for the product's release and a rival's."""
    values = recipe.model_dump(mode="json")
    values["target_gradient"] |= SPACE
    values["privacy"] |= {"delta": 1e-5, "declared_records": 200, "budget_epsilon": 2.0}
    values["finetune_eval"] |= {"seeds": [0, 1], "learning_rates": [1e-4], "steps": [1]}
    return validate_recipe(values, "test")


def test_a_rival_is_charged_for_its_own_releases_and_released_once(
    rival_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, drawn = rival_recipe, []

    def noisy(votes: dict[int, np.ndarray], mechanism: GaussianMechanism | None) -> dict[int, np.ndarray]:
        drawn.append(None if mechanism is None else mechanism.sigma)
        return noisy_votes(votes, mechanism)

    monkeypatch.setattr("gradmm.rivals.private_evolution.noisy_votes", noisy)
    names = [f"private-evolution-10{labels}, epsilon 1" for labels in ("", ", soft labels")]
    for _ in range(2):
        record = compare(recipe, tmp_path, (4,), ("before", "private-evolution-10"), (1.0,))
        assert record.arms == ("before", PRODUCT, f"{PRODUCT}, epsilon 1", *names)
        releases = [entry.release for entry in Ledger.of(tmp_path, recipe.ledger).entries()]
        votes = [release for release in releases if release.space == "votes for texts"]
        assert len(votes) == 10
        assert len(releases) == 11
        assert drawn == pytest.approx([release.sigma for release in votes])  # as much noise as the ledger counts
        assert composed_epsilon(votes, 1e-5, "add-or-remove") == pytest.approx(1.0, rel=1e-6)
    assert executed(record) == {"mechanism_audit": 1}
    table = record.table.read().set_index("arm")
    assert table["seeds"][names].tolist() == [2, 2]
    rounds = [stage.read() for stage in stages(record, "private_votes")]
    assert [len(rows) for rows in rounds] == [6] * 10
    chosen = set(rounds[-1]["text"])
    labelled = [rows for stage in stages(record, "labelling") if set((rows := stage.read())["text"]) == chosen]
    hard, soft = labelled[0], labelled[-1]
    assert all(max(row) == 1 for row in hard["probabilities"])
    assert not any(max(row) == 1 for row in soft["probabilities"])
    shared = stages(record, "class_shares")[0]
    last = stages(record, "private_votes")[-1].figures
    expected, _ = with_class_shares(soft, *read_records(last), recipe.class_names)
    np.testing.assert_allclose(np.stack([*shared.read()["probabilities"]]), np.stack([*expected["probabilities"]]))
    assert last["records"].keys() == {"0", "1"}
    assert "The texts of Private Evolution are its release" in study_page(record)


def test_a_rivals_release_that_an_older_ledger_does_not_know_is_not_used(
    rival_recipe: Recipe, tmp_path: Path
) -> None:
    ledger = Ledger.of(tmp_path, rival_recipe.ledger)
    compare(rival_recipe, tmp_path, (4,), ("before",), (1.0,))
    older = ledger.file.read_bytes()
    compare(rival_recipe, tmp_path, (4,), ("before", "epsvec"), (1.0,))
    assert len(ledger.entries()) == 2
    ledger.file.write_bytes(older)
    with pytest.raises(InputError, match="no charged release matches"):
        compare(rival_recipe, tmp_path, (4,), ("before", "epsvec"), (1.0,))
    assert len(ledger.entries()) == 1


def test_texts_of_two_strengths_are_steered_by_one_release(
    rival_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, real_rows = rival_recipe, {0: set(), 1: set()}

    def measured(reader: TextReader, texts: Sequence[str], real: Sequence[str], seed: int) -> dict[str, float]:
        real_rows[seed].add(tuple(sorted(real)))
        return text_measures(reader, texts, real, seed)

    monkeypatch.setattr("gradmm.tasks.studies.arm_measures.text_measures", measured)
    rivals = ("epsvec", "epsvec-2")
    names = [f"{rival}{labels}, epsilon 1" for rival in rivals for labels in ("", ", soft labels")]
    for _ in range(2):
        record = compare(recipe, tmp_path, (4,), ("before", *rivals), (1.0,))
        assert record.arms == ("before", PRODUCT, f"{PRODUCT}, epsilon 1", *names)
        releases = [entry.release for entry in Ledger.of(tmp_path, recipe.ledger).entries()]
        assert [release.space for release in releases if release.space == "mean hidden states"] != []
        assert [release.epsilon for release in releases] == pytest.approx([1.0, 1.0], rel=1e-6)
    assert executed(record) == {"mechanism_audit": 1}
    assert [len(rows) for rows in real_rows.values()] == [1, 1]  # the same for all arms, however they are labelled
    assert len(texts_of(record, "steered_texts")) == 4  # one for each strength and seed
    assert len(stages(record, "private_means")) == 2
    assert len({stage.sha256 for stage in stages(record, "private_means")}) == 1
    assert len(stages(record, "class_shares")) == 4
    assert "Private Evolution" not in study_page(record)
    assert record.table.read().set_index("arm")["seeds"][names].tolist() == [2] * 4


def test_examples_are_released_once_and_the_texts_are_written_after_them(
    rival_recipe: Recipe, tmp_path: Path
) -> None:
    names = [f"dp-few-shot{labels}, epsilon 1" for labels in ("", ", soft labels")]
    others = texts_of(compare(rival_recipe, tmp_path, (4,), ("before",), (1.0,)), "generation")
    for _ in range(2):
        record = compare(rival_recipe, tmp_path, (4,), ("before", "dp-few-shot"), (1.0,))
        assert record.arms == ("before", PRODUCT, f"{PRODUCT}, epsilon 1", *names)
        releases = [entry.release for entry in Ledger.of(tmp_path, rival_recipe.ledger).entries()]
        assert [release.space for release in releases].count("next-token probabilities") == 1
        assert [release.epsilon for release in releases] == pytest.approx([1.0, 1.0], rel=1e-6)
    assert executed(record) == {"mechanism_audit": 1}
    (examples,) = (stage.read() for stage in stages(record, "private_examples"))
    assert examples["label"].value_counts().to_dict() == {0: 4, 1: 4}
    assert len(texts_of(record, "generation") - others) == 2  # one for each seed
    assert record.table.read().set_index("arm")["seeds"][names].tolist() == [2] * 2


def test_adapters_are_released_once_and_write_the_texts(rival_recipe: Recipe, tmp_path: Path) -> None:
    names = [f"dp-adapters{labels}, epsilon 1" for labels in ("", ", soft labels")]
    records = []
    for _ in range(2):
        record = compare(rival_recipe, tmp_path, (4,), ("before", "dp-adapters"), (1.0,))
        records.append(record)
        assert record.arms == ("before", PRODUCT, f"{PRODUCT}, epsilon 1", *names)
        releases = [entry.release for entry in Ledger.of(tmp_path, rival_recipe.ledger).entries()]
        assert [release.space for release in releases].count("weights of adapters") == 1
        assert [release.epsilon for release in releases] == pytest.approx([1.0, 1.0], rel=1e-6)
    assert executed(record) == {"mechanism_audit": 1}
    (adapters,) = (stage.read() for stage in stages(record, "private_adapters"))
    assert all(".lora_B." in name for name in adapters["weight"])
    assert np.concatenate(adapters["values"].tolist()).any()
    assert len(texts_of(record, "adapted_texts")) == 2  # one for each seed
    made, again = (each.making_seconds for each in records)
    assert list(made) == [PRODUCT, f"{PRODUCT}, epsilon 1", names[0]]
    assert list(made[names[0]]) == ["private_adapters", "generation", "adapted_texts", "labelling"]
    assert again == {}
    page = study_page(records[0])
    assert f"- {names[0]}: " in page
    assert "(private_adapters " in page
    assert record.table.read().set_index("arm")["seeds"][names].tolist() == [2] * 2


def test_a_rival_that_the_budget_does_not_allow_is_refused_before_anything_is_computed(
    rival_recipe: Recipe, tmp_path: Path
) -> None:
    privacy = rival_recipe.privacy.model_copy(update={"budget_epsilon": 1.1})
    recipe = rival_recipe.model_copy(update={"privacy": privacy})
    with pytest.raises(BudgetExhausted, match="these 11 releases would bring"):
        compare(recipe, tmp_path, (4,), ("before", "private-evolution-10"), (1.0,))
    assert not list(tmp_path.glob("stages/*/*"))
    assert Ledger.of(tmp_path, recipe.ledger).entries() == []


def test_a_rival_is_refused_before_its_first_histogram_if_its_texts_are_new(
    rival_recipe: Recipe, tmp_path: Path
) -> None:
    """The ledger has as many histograms, of other texts; that these are new is known once they are written."""
    arms = ("before", "private-evolution-10")
    compare(rival_recipe, tmp_path, (4,), arms, (1.0,))
    ledger = Ledger.of(tmp_path, rival_recipe.ledger)
    spent, budget = len(ledger.entries()), ledger.budget()
    assert budget is not None
    ledger.set_budget(budget.model_copy(update={"epsilon": 1.1 * ledger.spent(1e-5, "add-or-remove")}))
    with pytest.raises(BudgetExhausted):
        compare(rival_recipe.model_copy(update={"seed": 5}), tmp_path, (4,), arms, (1.0,))
    assert len(ledger.entries()) == spent


def test_a_rival_that_is_killed_while_it_counts_votes_has_charged_nothing(
    rival_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradmm.rivals.private_evolution.count_votes", killed)
    with pytest.raises(KeyboardInterrupt):
        compare(rival_recipe, tmp_path, (4,), ("before", "private-evolution"), (1.0,))
    assert len(Ledger.of(tmp_path, rival_recipe.ledger).entries()) == 1  # the product's


def test_a_model_that_cannot_be_steered_is_refused_before_a_charge(
    rival_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise InputError("has one layer", "model", "use another model")

    monkeypatch.setattr("gradmm.rivals.epsvec.middle_layer", refused)
    with pytest.raises(InputError, match="has one layer"):
        compare(rival_recipe, tmp_path, (4,), ("before", "private-evolution", "epsvec"), (1.0,))
    assert Ledger.of(tmp_path, rival_recipe.ledger).entries() == []
    assert not list(tmp_path.glob("stages/*/*"))


def test_a_rival_that_was_killed_after_its_charge_is_refused_before_anything_is_computed(
    rival_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as while_it_draws:
        while_it_draws.setattr("gradmm.rivals.few_shot.private_examples", killed)
        with pytest.raises(KeyboardInterrupt):
            compare(rival_recipe, tmp_path, (4,), ("before", "dp-few-shot"), (1.0,))
    ledger = Ledger.of(tmp_path, rival_recipe.ledger)
    budget = ledger.budget()
    assert budget is not None
    assert [entry.sha256 is None for entry in ledger.entries()] == [False, True]
    ledger.set_budget(budget.model_copy(update={"epsilon": 1.1 * ledger.spent(1e-5, "add-or-remove")}))
    before = set(tmp_path.glob("stages/*/*"))
    with pytest.raises(BudgetExhausted, match="this release would bring"):
        compare(rival_recipe, tmp_path, (4,), ("before", "zero-shot", "dp-few-shot"), (1.0,))
    assert set(tmp_path.glob("stages/*/*")) == before


def test_a_study_draws_no_target_for_each_variant(rival_recipe: Recipe, tmp_path: Path) -> None:
    privacy = rival_recipe.privacy.model_copy(update={"redraw": True})
    with pytest.raises(InputError, match="would draw and charge another for each variant"):
        compare(rival_recipe.model_copy(update={"privacy": privacy}), tmp_path / "root", (4,), ("before",), (1.0,))
    assert not (tmp_path / "root").exists()


def test_a_rival_needs_a_guarantee_and_features(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="epsilon: private-evolution releases under a guarantee"):
        compare(recipe, tmp_path, (2,), ("private-evolution",))
    with pytest.raises(InputError, match=r"privacy\.declared_records: dp-few-shot draws records at a rate that"):
        compare(recipe, tmp_path, (2,), ("dp-few-shot",), (1.0,))
    with pytest.raises(InputError, match=r"target_gradient\.probe_share: private-evolution compares texts by"):
        compare(recipe, tmp_path, (2,), ("private-evolution",), (1.0,))
