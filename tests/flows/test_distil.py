"""The whole flow on a tiny model: what is made, what is cached, what runs again."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from pandas.testing import assert_frame_equal
from transformers import PreTrainedTokenizerFast

from gradmm.config.loading import validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.config.settings import ExecutionSettings
from gradmm.data.examples import Examples, HeldOut, sample_class_rows
from gradmm.data.splits import load_splits
from gradmm.errors import InputError
from gradmm.evaluation.finetune_eval import Finetuning, chosen_schedule, evaluate_arm
from gradmm.flows.contamination import contamination
from gradmm.flows.distil import distil
from gradmm.flows.runtime.shard_runners import run_shards
from gradmm.gradients.head_gradient import HeadGradients, head_gradients
from gradmm.labelling.labelling import probability_matrix
from gradmm.lm import loading
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import ModelReference, resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import tokenise_template, tokenise_texts
from gradmm.outputs.record import RunRecord
from gradmm.storage.artifacts import METADATA_KEY
from gradmm.storage.location import Location
from gradmm.target import checkpoint, record_batches
from gradmm.tasks.runtime.registry import RUN_STAGES
from tests.flows.conftest import STAGES_OF_THE_PAPER, tiny_recipe_values
from tests.served_model import MODEL, WORDS, served_model
from tests.spread_model import in_memory, limit_memory

EVERY_STAGE = [*STAGES_OF_THE_PAPER, "memorisation"]


def run(recipe: Recipe, root: Location | str, **options: object) -> RunRecord:
    parameters: dict[str, Any] = {name: getattr(recipe, name) for name in Recipe.model_fields}
    parameters |= {"root": root, **options}
    record = distil(**parameters)
    assert isinstance(record, RunRecord)
    return record


def ran(record: RunRecord) -> list[str]:
    """The stages that were not cached."""
    return [stage.stage for stage in record.stages if not stage.cached]


@pytest.fixture(scope="module")
def first_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture
def root(first_root: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    """A root in which the tiny recipe has run, as it was then. References hold absolute paths, so it stays put."""
    if not (first_root / "runs").exists():
        run(tiny_recipe(), first_root)
        shutil.copytree(first_root, first_root.with_name("pristine"))
    shutil.rmtree(first_root)
    shutil.copytree(first_root.with_name("pristine"), first_root)
    return first_root


def test_a_part_of_a_block_is_valid_with_the_rest_that_its_deployment_has(
    tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed = tiny_recipe(target_gradient={"space": "public-subspace", "token_share": 0}).model_dump(mode="json")

    def merged(blocks: dict[str, Any]) -> dict[str, Any]:
        assert blocks["target_gradient"] == {"probe_share": 0.2}  # by itself beyond the default token_share's rest
        return deployed | {"target_gradient": deployed["target_gradient"] | blocks["target_gradient"]}

    def stopped(recipe: Recipe, root: Path, force: tuple[str, ...]) -> None:
        assert (recipe.target_gradient.probe_share, root, force) == (0.2, Path("some/root"), ("generation",))
        raise KeyError("stopped here")

    monkeypatch.setattr("gradmm.flows.distil.over_deployment", merged)
    monkeypatch.setattr("gradmm.flows.distil.run_recipe", stopped)
    parameters = {name: deployed[name] for name in ("name", "data", "classes", "model")}
    with pytest.raises(KeyError, match="stopped here"):
        distil(**parameters, target_gradient={"probe_share": 0.2}, root="some/root", force=["generation"])


def test_a_copy_of_a_root_uses_its_own_files(
    root: Path, tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    record = run(tiny_recipe(), copy)
    assert not ran(record)
    assert all(str(stage.path).startswith(str(copy)) for stage in record.stages)
    shutil.rmtree(copy / "stages")
    with pytest.raises(InputError, match="it is the record of another root's"):
        run(tiny_recipe(), copy)


def test_shards_that_prefect_has_no_record_of_are_made_by_the_runner(
    root: Path, tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(root / "results")
    runners = []

    def here(stage: Any, calls: Sequence[Any], settings: ExecutionSettings) -> Any:
        runners.extend([settings.runner] * len(calls))
        return run_shards(stage, calls, ExecutionSettings())

    monkeypatch.setattr("gradmm.flows.runtime.stage_runs.run_shards", here)
    run(tiny_recipe(execution={"runner": "processes", "workers": 2}), root)
    assert set(runners) == {"processes"}


def test_a_run_makes_all_stages_and_a_second_one_only_reads_them(
    root: Path, tiny_recipe: Callable[..., Recipe]
) -> None:
    record = run(tiny_recipe(), root)
    assert [stage.stage for stage in record.stages] == EVERY_STAGE
    assert ran(record) == []
    first, second = (json.loads(file.read_text()) for file in sorted(root.glob("runs/*/run.json")))
    assert [stage["cached"] for stage in first["stages"]] == [False] * 9
    assert [stage["sha256"] for stage in first["stages"]] == [stage["sha256"] for stage in second["stages"]]


def test_a_report_shows_whether_the_model_has_seen_the_data_once_that_was_checked(
    root: Path, tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(record: RunRecord) -> str:
        return (root / "runs" / record.run_id / "report.html").read_text()

    assert "<code>gradmm audit tiny --contamination</code>" in report(run(tiny_recipe(), root))
    monkeypatch.setattr("gradmm.audits.contamination.MIN_ROWS", 16)
    found = contamination(tiny_recipe(), root).figures
    record = run(tiny_recipe(), root)
    assert [stage.stage for stage in record.stages] == [*EVERY_STAGE, "contamination"]
    assert ran(record) == []
    shown = report(record)
    assert "--contamination</code>" not in shown
    area = found["areas"]["neighbours"]
    assert f"{area['auc']:.3f} ({area['low']:.3f} to {area['high']:.3f}; found from" in shown
    assert shown.count("of train rows against test rows") == 2
    # Another seed draws other rows, and other data were not checked.
    assert "--contamination</code>" in report(run(tiny_recipe(seed=1), root))


def test_cached_runs_in_a_row_keep_no_file_open_and_leave_a_run_folder_each(
    root: Path, tiny_recipe: Callable[..., Recipe]
) -> None:
    """As a schedule makes them; `benchmarks.load runs` measures a hundred."""
    process, held = psutil.Process(), []
    before = set(root.rglob("*"))
    for _ in range(5):
        assert ran(run(tiny_recipe(), root)) == []
        held.append((process.num_fds(), process.num_threads()))
    files, threads = held[-1]
    assert files <= held[1][0] + 2
    assert threads <= held[1][1] + 2
    added = {path.relative_to(root).parts[:2] for path in set(root.rglob("*")) - before}
    assert len([place for place in added if place[0] == "runs"]) == 5
    assert {place[0] for place in added} == {"runs"}


def test_a_target_that_was_killed_goes_on_to_the_same_bytes_and_leaves_nothing_behind(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def killed_at_the_third_batch(*arguments: Any) -> HeadGradients:
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return head_gradients(*arguments)

    recipe = tiny_recipe(target_gradient={"batch_size": 8})
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(record_batches, "head_gradients", killed_at_the_third_batch)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path)
    (left,) = (tmp_path / "unfinished").iterdir()
    assert left.name.startswith("target_gradient-")
    record = run(recipe, tmp_path)
    assert len(seen) == 2 + 1 + 4  # 2 x 20 records in batches of 8 are 6
    assert not list((tmp_path / "unfinished").iterdir())
    shutil.rmtree(tmp_path / "stages")
    assert run(recipe, tmp_path).stage("target_gradient").sha256 == record.stage("target_gradient").sha256


def test_every_parquet_opens_with_pandas_and_says_how_it_was_made(root: Path) -> None:
    import pyarrow.parquet as pq

    files = list(root.glob("stages/*/*.parquet"))
    assert {file.parent.name for file in files} == set(RUN_STAGES) - {
        "target_space",
        "mechanism_audit",
        "word_tilt",
    }
    digests = set()
    for file in files:
        assert len(pd.read_parquet(file)) > 0
        described = json.loads(pq.read_schema(file).metadata[METADATA_KEY])
        assert described["stage"] == file.parent.name
        assert described["code"].startswith("gradmm ")
        assert described["upstream"]
        assert set(described) == {"stage", "code", "settings", "upstream", "figures"}
        digests.add(described["stage"])
    of_filter = next(f for f in files if f.parent.name == "loss_selection")
    described = json.loads(pq.read_schema(of_filter).metadata[METADATA_KEY])
    assert described["settings"]["settings"] == {"per_class": 3, "by": "text", "near_duplicate": 0.5}
    assert set(described["upstream"]) == {"texts", "target", "model"}


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory's peak is Linux's")
def test_memory_is_told_of_stages_that_ran(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    record = run(tiny_recipe(loss_selection={"per_class": 1}), root)
    for stage in record.stages:
        assert stage.peak_memory is None if stage.cached else stage.peak_memory > 2**26
        assert bool(stage.memory) != stage.cached


def test_changing_a_filter_runs_it_and_what_follows_it(
    root: Path, tiny_recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    fine_tunings = set(root.glob("stages/arm_eval/*"))
    record = run(tiny_recipe(loss_selection={"per_class": 2}), root)
    assert ran(record) == [
        "loss_selection",
        "category_balance",
        "labelling",
        "finetune_eval",
        "mia_audit",
        "memorisation",
    ]
    # The model before fine-tuning is not measured again, and no arm is said to be short of texts.
    assert len(set(root.glob("stages/arm_eval/*")) - fine_tunings) == 2
    assert "fewer than" not in caplog.text


def test_fine_tunings_are_those_of_a_plain_loop_and_each_is_cached_by_itself(
    root: Path, tiny_recipe: Callable[..., Recipe]
) -> None:
    settings = {"seeds": [7, 8], "learning_rates": [1e-6, 3e-3], "steps": [3, 4], "max_test_rows": 10}
    recipe = tiny_recipe(finetune_eval=settings)
    before = set(root.glob("stages/arm_eval/*"))
    record = run(recipe, root)
    frame = record.stage("finetune_eval").read()

    reference = resolve_model(recipe.model)
    language_model = load_language_model(reference, "cpu")
    template = tokenise_template(language_model, PromptTemplate.of(recipe))
    trainer = Finetuning(
        reference, language_model.tokenizer, language_model.device, template, recipe.finetune_eval
    )

    def tokenised(texts: Sequence[str], labels: Sequence[int]) -> Examples:
        return Examples(tokenise_texts(language_model.tokenizer, texts, template.max_text_tokens, ""), labels)

    splits = load_splits(recipe.data, (0, 1), recipe.seed)
    train, validation, test = (
        tokenised(s.texts, s.labels) for s in (splits.train, splits.validation, splits.test)
    )
    held_out = HeldOut(validation, test).limited(recipe.finetune_eval, 7)
    labelled = record.stage("labelling").read()
    counts = Counter(labelled["written_for"])
    synthetic = replace(
        tokenised(labelled["text"].tolist(), labelled["label"].tolist()),
        probabilities=torch.from_numpy(probability_matrix(labelled)),
    )
    for arm, draw in (
        ("synthetic", lambda _: synthetic),
        ("real", lambda seed: train.take(sample_class_rows(train.labels, counts, seed))),
    ):
        rows = frame[frame["arm"] == arm]
        rate, steps = chosen_schedule(rows)
        runs = rows[["seed", "learning_rate", "steps"]].drop_duplicates().to_numpy().tolist()
        assert runs == [[7, 1e-6, 3], [7, 1e-6, 4], [7, 3e-3, 3], [7, 3e-3, 4], [8, rate, steps]]
        for seed, rates, numbers in ((7, (1e-6, 3e-3), (3, 4)), (8, (rate,), (steps,))):
            update = {"seeds": (seed,), "learning_rates": rates, "steps": numbers}
            one = replace(trainer, settings=recipe.finetune_eval.model_copy(update=update))
            expected = evaluate_arm(one, arm, draw(seed), held_out)
            pd.testing.assert_frame_equal(rows[rows["seed"] == seed].reset_index(drop=True), expected)
    made = set(root.glob("stages/arm_eval/*"))
    assert len(made - before) == 1 + 2 * 2  # before, as other test rows are drawn, and two arms of two seeds
    run(tiny_recipe(finetune_eval=settings | {"seeds": [7, 8, 9]}), root)
    assert len(set(root.glob("stages/arm_eval/*")) - made) == 2


def test_adapters_are_trained_wherever_the_model_is(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    whole = run(tiny_recipe(), root).stage("finetune_eval").read()
    record = run(tiny_recipe(finetune_eval={"lora_rank": 2}), root)
    assert ran(record) == ["finetune_eval", "mia_audit"]
    adapted = record.stage("finetune_eval").read()
    begun = whole["arm"] == "before"
    assert adapted.loc[begun, "loss"].equals(whole.loc[begun, "loss"])
    assert (adapted.loc[~begun, "loss"] != whole.loc[~begun, "loss"]).all()


def test_figures_say_what_texts_cost_and_how_they_match_as_a_set(
    root: Path, tiny_recipe: Callable[..., Recipe]
) -> None:
    record = run(tiny_recipe(), root)
    generated, selected = record.stage("generation"), record.stage("loss_selection")
    rows = generated.read()
    # Reading a text takes at least its five tokens, and the search reads four, then twice four.
    assert rows["token_passes"].min() > 5 * (4 + 2 * 4)
    assert generated.figures["token_passes_per_text"] == pytest.approx(rows["token_passes"].mean())
    for stage in (generated, selected, record.stage("category_balance")):
        assert 0 < stage.figures["distinct_2"] <= 1
        assert 0 <= stage.figures["self_bleu"] <= 1
    for figure in ("set_matching_loss", "set_matching_loss_before"):
        assert 0 <= selected.figures[figure] <= 2


def test_by_default_texts_are_written_with_the_released_words_and_have_soft_labels(
    tmp_path: Path, tiny_data: Path, tiny_model: ModelReference
) -> None:
    small = {
        "target_gradient": {"public_texts": 20, "public_text_tokens": 5, "probe_dimensions": 4},
        "word_tilt": {"texts": 10},
        "generation": {"per_class": 4, "text_tokens": 5},
        "label_filter": {},
        "loss_selection": {},
    }
    record = run(validate_recipe(tiny_recipe_values(tiny_data, tiny_model) | small, "test"), tmp_path)
    names = [stage.stage for stage in record.stages]
    assert names == ["target_space", "target_gradient", "word_tilt", *EVERY_STAGE[1:]]
    words = record.stage("word_tilt").read()
    assert set(words["label"]) == {0, 1}
    assert record.stage("word_tilt").figures["token_passes"] > 0
    assert record.stage("generation").read()["matching_loss"].isna().all()
    probabilities = record.stage("labelling").read()["probabilities"]
    assert all(sum(each) == pytest.approx(1.0) and max(each) < 1 for each in probabilities)


def test_admm_makes_other_texts_for_the_same_target(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    searched = run(tiny_recipe(), root)
    by_admm = run(tiny_recipe(generation=tiny_recipe().generation.model_dump() | {"method": "admm"}), root)
    assert ran(by_admm)[0] == "generation"
    assert by_admm.stage("generation").rows == searched.stage("generation").rows == 8
    assert by_admm.stage("generation").sha256 != searched.stage("generation").sha256


def test_choosing_the_best_set_runs_the_filters_only(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    record = run(tiny_recipe(loss_selection={"by": "set"}), root)
    assert ran(record)[0] == "loss_selection"
    assert record.stage("loss_selection").figures["kept_by_label"] == {"0": 3, "1": 3}


@pytest.mark.parametrize("stage", ["target_gradient", "loss_selection", "finetune_eval"])
def test_deleting_a_parquet_runs_its_stage_and_no_other(
    root: Path, tiny_recipe: Callable[..., Recipe], stage: str
) -> None:
    for file in root.glob(f"stages/{stage}/*.parquet"):
        file.unlink()
    assert ran(run(tiny_recipe(), root)) == [stage]


def test_a_damaged_parquet_runs_its_stage_and_no_other(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    (file,) = root.glob("stages/label_filter/*.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert ran(run(tiny_recipe(), root)) == ["label_filter"]


def test_deleting_a_shard_keeps_the_others(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    shards = sorted(root.glob("stages/generation_shard/*.parquet"))
    assert len(shards) == 4
    before = {file: file.stat().st_mtime_ns for file in shards}
    shards[2].unlink()
    assert ran(run(tiny_recipe(), root)) == ["generation"]
    again = {file: file.stat().st_mtime_ns for file in shards}
    assert [file for file in shards if again[file] != before[file]] == [shards[2]]


def test_more_texts_keep_the_shards_that_are_there(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    before = set(root.glob("stages/generation_shard/*.parquet"))
    run(tiny_recipe(generation={**tiny_recipe().generation.model_dump(), "per_class": 6}), root)
    after = set(root.glob("stages/generation_shard/*.parquet"))
    assert before < after
    assert len(after - before) == 2


def test_settings_that_decide_nothing_run_nothing(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    recipe = tiny_recipe(target_gradient={"batch_size": 3}, label_filter={"enabled": False, "batch_size": 1})
    assert ran(run(recipe, root)) == []


def test_wording_for_the_generator_leaves_the_target_alone(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    """The target is the private release: rewording an instruction must not draw another."""
    classes = [c.model_dump() | {"instruction": "they said :\n"} for c in tiny_recipe().classes]
    recipe = tiny_recipe(classes=classes)
    assert "target_gradient" not in ran(run(recipe, root))
    assert "generation" in ran(run(recipe.model_copy(update={"seed": 5}), root))


def test_changed_data_runs_everything_from_the_target_on(
    root: Path, tiny_recipe: Callable[..., Recipe], tiny_data: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    train = pd.read_parquet(data / "train.parquet")
    train.loc[0, "text"] = "a new and better text"
    train.to_parquet(data / "train.parquet")
    moved = tiny_recipe(data={"path": str(data)})
    assert ran(run(moved, root))[0] == "target_gradient"
    # The same texts at another place are the same data.
    train.loc[0, "text"] = pd.read_parquet(tiny_data / "train.parquet")["text"][0]
    train.to_parquet(data / "train.parquet")
    assert ran(run(moved, root)) == []


def test_forcing_a_stage_runs_it(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    assert ran(run(tiny_recipe(), root, force=("label_filter",))) == ["label_filter"]


def test_forcing_what_is_no_stage_is_refused(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(InputError, match="no stage 'finetune-eval'; choose from target_space"):
        run(tiny_recipe(), root, force=("finetune-eval",))


def test_forcing_a_stage_runs_its_shards_again(root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    began = {file: file.stat().st_mtime_ns for file in root.glob("results/arm_eval/*")}
    assert len(began) == 3
    assert ran(run(tiny_recipe(), root, force=("finetune_eval",))) == ["finetune_eval"]
    assert all(file.stat().st_mtime_ns > before for file, before in began.items())


def test_the_release_loads_and_says_nothing_private(root: Path, tmp_path: Path, tiny_data: Path) -> None:
    from datasets import load_dataset

    (release,) = root.glob("runs/*/release")
    dataset = load_dataset(str(release), cache_dir=str(tmp_path / "cache"))["train"]
    assert {"text", "label"} <= set(dataset.column_names)
    assert dataset.features["label"].names == ["bad", "good"]
    published = b"".join(file.read_bytes() for file in release.rglob("*") if file.is_file())
    for text in pd.read_parquet(tiny_data / "train.parquet")["text"]:
        assert text.encode() not in published
        assert text not in dataset["text"]
    assert str(tiny_data).encode() not in published


def test_a_served_model_writes_the_texts_and_a_run_without_it_is_refused_before_it_computes(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    with served_model() as served:
        values = {"endpoint": {"url": served.url, "model": MODEL}, "method": "written", "whole_sentences": False}
        recipe = tiny_recipe(generation=values, target_gradient={"token_share": 0.4})
        record = run(recipe, tmp_path)
        assert "word_tilt" not in ran(record)
        written = pd.read_parquet(str(record.stage("generation").path))["text"]
        assert len(written) == len(served.requests) == 8
        assert all(text.split()[0] in WORDS for text in written)
        instructions = {each.instruction for each in recipe.classes}
        assert {body["prompt"] for _, body in served.requests} == instructions
    assert run(recipe, tmp_path).unchanged  # the server is gone
    with pytest.raises(InputError, match=r"generation.endpoint.url: http://127.* cannot be reached"):
        run(recipe, tmp_path / "new")
    assert not list((tmp_path / "new").glob("stages/*"))


def test_a_model_with_layers_on_the_disk_goes_through_every_stage(
    tmp_path: Path,
    tiny_recipe: Callable[..., Recipe],
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = in_memory(tokenizer, tmp_path / "model", "phi", "float32")
    limit_memory(monkeypatch, {"cpu": model.weight_bytes * 2 // 3})
    spread = []
    gather = loading._with_outputs_on_one_device
    monkeypatch.setattr(
        loading, "_with_outputs_on_one_device", lambda model, name: spread.append(model) or gather(model, name)
    )
    records = []
    for device in ("cpu", "balanced"):
        assert not spread
        where = {"name": str(tmp_path / "model"), "device": device}
        records.append(run(tiny_recipe(model=where, finetune_eval={"lora_rank": 2}), tmp_path / device))
    # The frozen one, and that of each fine-tuning.
    assert len(spread) > 3
    assert all(any(weight.is_meta for weight in model.parameters()) for model in spread)
    one, other = records
    assert ran(one) == ran(other) == EVERY_STAGE
    assert_frame_equal(one.stage("labelling").read(), other.stage("labelling").read())


@pytest.mark.parametrize("large", [False, True])
def test_only_a_small_frozen_model_is_kept_while_another_is_trained(
    root: Path, tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(loading, "LARGE_MODEL", 0)
    record = run(tiny_recipe(finetune_eval={"steps": 5}), root)
    assert "finetune_eval" in ran(record)
    assert loading._load.cache_info().currsize == (0 if large else 1)
