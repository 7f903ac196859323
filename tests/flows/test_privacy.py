"""The privacy promise over whole runs: what is charged, what is refused, and what private data can reach."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from prefect import flow
from prefect.client.schemas.objects import State

import gradmm.tasks.runtime.inputs
import gradmm.tasks.target_gradient
from gradmm.audits.memorisation import compare_texts
from gradmm.config.recipe import Recipe
from gradmm.data.examples import Examples
from gradmm.errors import BudgetExhausted, InputError
from gradmm.evaluation import memory_plan
from gradmm.evaluation.finetune_eval import Finetuning
from gradmm.evaluation.membership import attack_texts
from gradmm.filters.label_filter import filter_labels
from gradmm.filters.rows import kept_texts
from gradmm.filters.subset_selection import set_losses
from gradmm.flows.distil import distil
from gradmm.flows.pipeline import release_target, stage_runs, synthetic_texts
from gradmm.generation.generation import generate
from gradmm.outputs.formatting import leaves
from gradmm.outputs.record import RunRecord, StageRecord
from gradmm.outputs.release import RELEASE_FILES
from gradmm.privacy.guarantee import Guarantee
from gradmm.privacy.ledger import Budget, Entry, Ledger, budget_of, release_of
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.release_plan import release_plan
from gradmm.storage.artifacts import METADATA_KEY, Root
from gradmm.storage.location import read_bytes
from gradmm.target import checkpoint
from gradmm.target.probe import Moments, Probe
from gradmm.target.tables import matrix_of
from gradmm.target.target_gradient import Released, TargetSums
from gradmm.target.token_rates import TokenSums
from gradmm.tasks.runtime.privacy_budget import composed_guarantee
from gradmm.tasks.runtime.registry import STAGE_VERSIONS

#: Large enough that a release of a few records is not all noise.
PRIVACY = {"epsilon": 4.0, "delta": 1e-5, "declared_records": 200}
SPACE = {
    "space": "public-subspace",
    "subspace_dimensions": 4,
    "centred": True,
    "public_texts": 8,
    "public_text_tokens": 5,
    "probe_share": 0.5,
    "token_share": 0.0,
    "probe_dimensions": 3,
}

#: Token rates, and a declared number of records that lets them stand out from the noise.
WITH_TOKENS = {"probe_share": 0.3, "token_share": 0.4}
ENOUGH_FOR_TOKENS = {"declared_records": 2000}

#: The stages that private records reach, in the order in which they run. All else sees the noisy target only.
READ_PRIVATE_DATA = ["target_gradient", "arm_eval", "mia_audit", "memorisation"]


@pytest.fixture
def private_recipe(tiny_recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    def build(privacy: dict | None = None, **changes: dict) -> Recipe:
        changes.setdefault("target_gradient", SPACE)
        return tiny_recipe(privacy=PRIVACY | (privacy or {}), **changes)

    return build


def run(recipe: Recipe, root: Path) -> RunRecord:
    record = distil(**{name: getattr(recipe, name) for name in Recipe.model_fields}, root=root)
    assert isinstance(record, RunRecord)
    return record


@dataclass(frozen=True)
class FirstStages:
    """Records of the stages that ran, and the guarantee after them."""

    stages: list[StageRecord]
    guarantee: Guarantee

    def stage(self, name: str) -> StageRecord:
        return next(stage for stage in self.stages if stage.stage == name)


@flow(persist_result=False, validate_parameters=False)
def run_first(recipe: Recipe, root: Path, force: Sequence[str] = (), texts: bool = False) -> FirstStages:
    """Run the stages up to the target, which alone spend the budget; with `texts`, generation and filters too."""
    place = Root(path=root.resolve())
    place.prepare()
    runs = stage_runs(recipe, recipe, place, force)
    target = release_target(runs, recipe)
    if texts:
        synthetic_texts(runs, recipe, target)
    return FirstStages(runs.records, composed_guarantee(recipe.privacy, runs.plan, runs.context))


def allow(recipe: Recipe, root: Path, epsilon: float) -> None:
    """Raise the budget, as the data's owner does by `gradmm privacy RECIPE --set-budget`."""
    delta = recipe.privacy.delta
    assert delta is not None
    Ledger.of(root, recipe.ledger).set_budget(Budget(epsilon=epsilon, delta=delta, adjacency="add-or-remove"))


def releases(recipe: Recipe, root: Path) -> list[Entry]:
    return Ledger.of(root, recipe.ledger).entries()


@pytest.mark.parametrize("fault", ["forgotten", "moved"])
def test_a_space_that_prefect_does_not_remember_is_not_made_again(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """In other bits, as on another processor, it would ask for another release."""
    recipe, before, root = private_recipe(), tmp_path / "before", tmp_path / "root"
    first = run_first(recipe, before)
    before.rename(root)
    if fault == "forgotten":
        for stage in ("target_space", "target_gradient"):
            shutil.rmtree(root / "results" / stage)
    monkeypatch.setattr(
        "gradmm.target.target_space.space_of_public_text", lambda *_: pytest.fail("another space is made")
    )
    again = run_first(recipe, root)
    for stage in ("target_space", "target_gradient"):
        assert again.stage(stage).sha256 == first.stage(stage).sha256
    assert len(releases(recipe, root)) == 1


def test_a_damaged_space_is_made_again(private_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    first = run_first(private_recipe(), tmp_path)
    (file,) = (tmp_path / "stages" / "target_space").iterdir()
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    again = run_first(private_recipe(), tmp_path)
    assert again.stage("target_gradient").sha256 == first.stage("target_gradient").sha256
    assert file.read_bytes() == content


def test_a_private_run_is_charged_once_however_often_it_is_resumed_or_retuned(
    private_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = private_recipe()
    first = run(recipe, tmp_path)
    assert first.stages[0].stage == "target_space"
    (entry,) = releases(recipe, tmp_path)
    assert entry.sha256 == first.stage("target_gradient").sha256
    assert entry.release.epsilon == 4.0
    assert entry.release.space == "public-subspace, centred, and a probe"
    assert first.guarantee.releases == 1
    assert first.guarantee.composed_epsilon == pytest.approx(4.0)

    retuned = run(private_recipe(loss_selection={"per_class": 2}), tmp_path)
    assert retuned.stage("target_gradient").cached
    shutil.rmtree(tmp_path / "results")  # all that Prefect remembers
    resumed = run(recipe, tmp_path)
    for later in (retuned, resumed):
        assert later.stage("target_gradient").sha256 == entry.sha256
    assert releases(recipe, tmp_path) == [entry]


def test_a_run_killed_between_publishing_and_recording_is_not_charged_twice(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = private_recipe()
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)

    def killed(self: Ledger, entry_id: str, sha256: str) -> Entry:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_finish", killed)
        with pytest.raises(KeyboardInterrupt):
            run_first(recipe, tmp_path)
    (begun,) = releases(recipe, tmp_path)
    assert begun.sha256 is None
    assert list((tmp_path / "unfinished").iterdir())
    record = run_first(recipe, tmp_path)
    (finished,) = releases(recipe, tmp_path)
    assert finished.id == begun.id
    assert finished.sha256 == record.stage("target_gradient").sha256
    assert not list((tmp_path / "unfinished").iterdir())  # no clean sum outlives its release


def test_a_run_killed_before_publishing_has_spent_its_release(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = private_recipe()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gradmm.target.target_gradient.released_target", killed)
        with pytest.raises(KeyboardInterrupt):
            run_first(recipe, tmp_path)
    assert len(releases(recipe, tmp_path)) == 1
    with pytest.raises(InputError, match=r"budget of 4 \(1 release so far\)"):
        run_first(recipe, tmp_path)
    with pytest.raises(InputError, match=r"budget of 4 \(1 release so far\)"):
        run_first(private_recipe({"budget_epsilon": 9.0}), tmp_path)  # the ledger's budget holds, not the recipe's
    allow(recipe, tmp_path, 9.0)
    record = run_first(recipe, tmp_path)
    assert record.guarantee.releases == 2
    assert 4 < (record.guarantee.composed_epsilon or 0) < 8  # composition is better than addition
    assert "All 2 releases under the same root" in record.guarantee.sentence


def test_a_skipped_ledger_is_caught(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def skipped(*_: object) -> Iterator[Callable[[str], None]]:
        yield lambda sha256: None

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", skipped)
        with pytest.raises(InputError, match="no charged release matches the private target"):
            run_first(private_recipe(), tmp_path, texts=True)
    assert not list(tmp_path.glob("stages/generation_shard/*"))


def test_a_target_whose_ledger_is_gone_is_not_used(private_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = private_recipe()
    run_first(recipe, tmp_path)
    shutil.rmtree(tmp_path / "ledger")
    for force in ((), ("target_gradient",)):
        with pytest.raises(InputError, match="restore the ledger from a backup"):
            run_first(recipe, tmp_path, force=force)
    assert not releases(recipe, tmp_path)


def test_another_release_is_refused_before_any_private_data_are_read(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_first(private_recipe(), tmp_path)
    other = private_recipe(target_gradient=SPACE | {"subspace_dimensions": 3})
    before = snapshot(tmp_path, "stages/target_gradient/*")
    with monkeypatch.context() as patch:
        patch.setattr(gradmm.tasks.runtime.inputs, "load_splits", lambda *_: pytest.fail("private data were read"))
        with pytest.raises(InputError, match=r"^privacy\.budget_epsilon: this release would bring"):
            run_first(other, tmp_path)
    assert snapshot(tmp_path, "stages/target_gradient/*") == before
    assert len(releases(other, tmp_path)) == 1


def test_an_upgrade_makes_changed_stages_again_and_draws_no_target_that_the_budget_does_not_allow(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_version(stage: str) -> None:
        monkeypatch.setitem(STAGE_VERSIONS, stage, STAGE_VERSIONS[stage] + 1)

    first = run(private_recipe(), tmp_path)
    raise_version("loss_selection")
    second = run(private_recipe(), tmp_path)
    again = [stage.stage for stage in second.stages if not stage.cached]
    from_selection_on = [
        "loss_selection",
        "category_balance",
        "labelling",
        "finetune_eval",
        "mia_audit",
        "memorisation",
    ]
    assert again == ["mechanism_audit", *from_selection_on]  # the audit is never cached
    # Nor does it replace the one that an earlier run's report shows.
    for audit in (record.stage("mechanism_audit") for record in (first, second)):
        assert hashlib.sha256(read_bytes(audit.path)).hexdigest() == audit.sha256
    assert second.stage("target_gradient").sha256 == first.stage("target_gradient").sha256
    blocks = {name: getattr(private_recipe(), name) for name in Recipe.model_fields}
    state = distil(**blocks, root=tmp_path, return_state=True)
    assert isinstance(state, State)
    assert state.name == "Unchanged"
    raise_version("target_gradient")
    with pytest.raises(InputError, match=r"^privacy\.budget_epsilon: this release would bring"):
        run(private_recipe(), tmp_path)
    assert len(releases(private_recipe(), tmp_path)) == 1
    assert first.stage("target_gradient").path.exists()


@pytest.mark.parametrize("loss", ["data changed", "target deleted", "target damaged", "redrawn"])
def test_a_target_that_would_have_to_be_drawn_again_is_another_release(
    private_recipe: Callable[..., Recipe], tmp_path: Path, tiny_data: Path, loss: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    recipe = private_recipe(data={"path": str(data)})
    root = tmp_path / "root"
    run_first(recipe, root)
    (target,) = root.glob("stages/target_gradient/*.parquet")
    if loss == "data changed":
        train = pd.read_parquet(data / "train.parquet")
        train.iloc[1:].to_parquet(data / "train.parquet")
    elif loss == "target deleted":
        target.unlink()
    elif loss == "target damaged":
        target.write_bytes(target.read_bytes()[:-1] + b"?")
    else:
        recipe = private_recipe({"redraw": True}, data={"path": str(data)})
    before = snapshot(root, "stages/target_gradient/*")
    with pytest.raises(InputError, match="would bring the composed epsilon to"):
        run_first(recipe, root)
    assert snapshot(root, "stages/target_gradient/*") == before
    assert len(releases(recipe, root)) == 1
    allow(recipe, root, 9.0)
    run_first(recipe, root)
    assert len(releases(recipe, root)) == 2


def test_a_charged_target_cannot_be_forced(private_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = private_recipe({"budget_epsilon": 100.0})
    run_first(recipe, tmp_path)
    with pytest.raises(InputError, match=r"drawing it again would be another release; .* privacy\.redraw=true"):
        run_first(recipe, tmp_path, force=("target_gradient",))
    assert len(releases(recipe, tmp_path)) == 1


@pytest.mark.parametrize("way", ["moved", "copied", "hard links", "symbolic links", "half of it", "another name"])
def test_data_under_another_name_share_their_budget(
    private_recipe: Callable[..., Recipe], tmp_path: Path, tiny_data: Path, way: str
) -> None:
    """Releases count by the records, wherever they lie and whatever the ledger is called."""
    data, other, root = tmp_path / "data", tmp_path / "other", tmp_path / "root"
    shutil.copytree(tiny_data, data)
    first = run_first(private_recipe(data={"path": str(data)}), root)
    changes: dict[str, object] = {"clipping_norm": 0.5}  # another target: else the first one is used again
    if way == "moved":
        data.rename(other)
    elif way == "hard links":
        shutil.copytree(data, other, copy_function=os.link)
    elif way == "symbolic links":
        other.symlink_to(data)
    else:
        shutil.copytree(data, other)
    if way == "half of it":
        train = pd.read_parquet(other / "train.parquet")
        pd.concat([train.iloc[::2], train.iloc[:8].assign(text=lambda rows: rows["text"] + " new")]).to_parquet(
            other / "train.parquet"
        )
    if way == "another name":
        changes["ledger"] = "something else"
    with pytest.raises(BudgetExhausted, match=r"above the budget of 4.* \(1 release so far\)"):
        run_first(private_recipe(changes, data={"path": str(other)}), root)
    assert len(list(root.glob("stages/target_gradient/*"))) == 1
    if way not in ("half of it", "another name"):
        again = run_first(private_recipe(data={"path": str(other)}), root)
        assert again.stage("target_gradient").sha256 == first.stage("target_gradient").sha256
        assert again.guarantee.releases == 1
    allowed = private_recipe(changes | {"budget_epsilon": 100.0}, data={"path": str(other)})
    for recipe in (private_recipe(data={"path": str(data)}), allowed):
        allow(recipe, root, 100.0)
    last = run_first(allowed, root)
    assert last.guarantee.releases == 2
    assert last.guarantee.composed_epsilon == pytest.approx(6.0, abs=0.5)


def test_a_refused_run_counts_no_records(
    private_recipe: Callable[..., Recipe], tmp_path: Path, tiny_data: Path
) -> None:
    """Data that lose the records which they share with others are free of the others' releases."""
    other, root = tmp_path / "other", tmp_path / "root"
    shutil.copytree(tiny_data, other)
    train = pd.read_parquet(other / "train.parquet")
    changed = train["text"] + " elsewhere"
    train.assign(text=[train["text"][0], *changed[1:]]).to_parquet(other / "train.parquet")
    run_first(private_recipe(), root)
    with pytest.raises(BudgetExhausted, match="this release would bring"):
        run_first(private_recipe(data={"path": str(other)}), root)
    train.assign(text=changed).to_parquet(other / "train.parquet")
    run_first(private_recipe(data={"path": str(other)}), root)


def test_other_data_have_a_budget_of_their_own(
    private_recipe: Callable[..., Recipe], tmp_path: Path, tiny_data: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    train = pd.read_parquet(other / "train.parquet")
    train.assign(text=train["text"] + " elsewhere").to_parquet(other / "train.parquet")
    run_first(private_recipe(), tmp_path / "root")
    run_first(private_recipe(data={"path": str(other)}), tmp_path / "root")


def test_runs_are_judged_by_the_ledgers_delta_and_adjacency(
    private_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """At a delta of its own, a second release would pass: 0.5 at delta 0.004 leaves room in a budget of 4."""
    run_first(private_recipe({"delta": 1e-6, "adjacency": "replace"}), tmp_path)
    lax = {"epsilon": 0.5, "delta": 0.004, "budget_epsilon": 4.0, "clipping_norm": 2.0}
    with pytest.raises(BudgetExhausted, match=r"at delta 1e-06 \(replace\), above the budget of 4"):
        run_first(private_recipe(lax), tmp_path)


def test_how_a_centred_target_is_matched_changes_the_texts_and_costs_no_release(
    private_recipe: Callable[..., Recipe], tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    by_direction = run_first(private_recipe(), tmp_path, texts=True)
    for generation in ({"matches": "difference"}, {"loss": "distance"}):
        record = run_first(private_recipe(generation=generation), tmp_path, texts=True)
        assert record.stage("target_gradient").cached
        assert not record.stage("generation").cached
        assert record.stage("generation").sha256 != by_direction.stage("generation").sha256
    assert len(releases(private_recipe(), tmp_path)) == 1
    alone = run_first(private_recipe(generation=generation, loss_selection={"per_class": 1}), tmp_path, texts=True)
    assert alone.stage("generation").cached
    selection = alone.stage("loss_selection")
    # A set of one text is as far from the target as the text is, by whichever loss.
    losses = kept_texts(selection.read())["matching_loss"]
    assert len(losses) == 2
    assert selection.figures["set_matching_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    run_first(tiny_recipe(target_gradient=SPACE, generation=generation), tmp_path, texts=True)  # and without noise


@pytest.mark.parametrize("epsilon", [None, 1000.0])
def test_texts_match_a_target_as_far_as_chance_does_not_explain_it(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epsilon: float | None
) -> None:
    matched: dict[str, dict[int, torch.Tensor]] = {"generated": {}, "selected": {}}

    def generated(request, target, *given):
        matched["generated"][request.shard.label] = target
        return generate(request, target, *given)

    def selected(label, target, **given):
        matched["selected"][label] = target
        return set_losses(label=label, target=target, **given)

    monkeypatch.setattr("gradmm.generation.generation.generate", generated)
    monkeypatch.setattr("gradmm.filters.loss_selection.set_losses", selected)
    privacy = PRIVACY | {"epsilon": epsilon, "clipping_norm": 0.5, "declared_records": 60}
    record = run_first(tiny_recipe(privacy=privacy, target_gradient=SPACE), tmp_path, texts=True)
    space, target = record.stage("target_space"), record.stage("target_gradient")
    for label in (0, 1):
        count = 30.0 if epsilon else target.figures["records"][str(label)]
        sigma = target.figures["sigma"] or 0.0
        difference = matrix_of(pq.read_table(target.path), label)
        # The gradient's part of 0.5^2 is a half.
        by_chance = 0.25 / 2 / count + sigma**2 * 8 / count**2
        trust = 1 - by_chance / float((difference / count).square().sum())
        assert 0.01 < trust < 0.99
        assert record.stage("generation").figures["target_shrinkage"][str(label)] == pytest.approx(trust)
        shrunk = trust * difference / (count * space.figures["clip_scale"][str(label)])
        for those in matched.values():
            assert torch.allclose(those[label], matrix_of(pq.read_table(space.path), label, "centre") + shrunk)


def test_a_probe_is_released_with_the_target_and_its_price_is_free(
    private_recipe: Callable[..., Recipe],
    tiny_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judges = []

    def filtered(*given):
        judges.append(given[-1])
        return filter_labels(*given).assign(kept=True)  # a random model's opinion would empty a class

    monkeypatch.setattr("gradmm.filters.label_filter.filter_labels", filtered)
    enabled = {"enabled": True, "exemplars": [{"text": "fresh bread", "label": 1}]}
    record = run_first(private_recipe(label_filter=enabled), tmp_path, texts=True)
    figures = record.stage("target_gradient").figures
    assert 0 <= figures["probe_shrinkage"] <= 1
    assert figures["second_moment_noise"] > figures["sigma"]
    parts = record.stage("target_gradient").read()["part"].value_counts().to_dict()
    assert parts == {"gradient": 4, "class_sum": 2, "second_moment": 4}
    assert record.stage("generation").read()["probe_loss"].notna().all()
    (entry,) = releases(private_recipe(), tmp_path)
    assert entry.release.space == "public-subspace, centred, and a probe"
    generation = tiny_recipe().generation.model_dump() | {"probe_weight": 0.0}
    free = run_first(private_recipe(generation=generation, label_filter=enabled), tmp_path, texts=True)
    assert free.stage("target_gradient").cached
    assert not free.stage("generation").cached
    assert len(releases(private_recipe(), tmp_path)) == 1
    # A probe that texts were made without does not judge them either.
    files = [pq.read_schema(each.stage("label_filter").path) for each in (record, free)]
    assert ["target" in json.loads(file.metadata[METADATA_KEY])["upstream"] for file in files] == [True, False]
    assert [isinstance(judge, Probe) for judge in judges] == [True, False]
    # Without one, the gradient has all of the budget: another release.
    recipe = private_recipe(target_gradient=SPACE | {"probe_share": 0.0})
    allow(recipe, tmp_path, 9.0)
    without = run_first(recipe, tmp_path, texts=True)
    assert "probe_shrinkage" not in without.stage("target_gradient").figures
    assert without.stage("generation").read()["probe_loss"].isna().all()
    assert len(releases(recipe, tmp_path)) == 2


def test_class_sums_alone_label_texts_and_choose_none(
    private_recipe: Callable[..., Recipe], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {
        "target_gradient": SPACE | {"probe_dimensions": "auto"},
        "label_filter": {"enabled": True, "exemplars": [{"text": "fresh bread", "label": 1}], "calibrated": True},
    }
    recipe = private_recipe(**changes)  # 200 records leave no second moment
    with caplog.at_level("INFO", logger="gradmm"):
        record = run_first(recipe, tmp_path, texts=True)
    assert any(message.startswith("no second moment, so the probe labels texts") for message in caplog.messages)
    released = record.stage("target_gradient")
    assert "second_moment_noise" not in released.figures
    parts = released.read().groupby("part")["values"].agg(lambda rows: [len(row) for row in rows]).to_dict()
    assert parts == {"gradient": [4, 4, 4, 4], "class_sum": [16, 16]}  # 16 public texts: 15 directions
    (entry,) = releases(recipe, tmp_path)
    assert entry.release.space == "public-subspace, centred, and class sums of a probe"
    assert record.stage("generation").read()["probe_loss"].isna().all()
    upstream = {
        name: json.loads(pq.read_schema(record.stage(name).path).metadata[METADATA_KEY])["upstream"]
        for name in ("label_filter", "labelling")
    }
    assert ["target" in upstream[name] for name in ("label_filter", "labelling")] == [False, True]
    trust = pytest.approx(released.figures["probe_shrinkage"], rel=1e-4)  # the table has float32
    assert record.stage("labelling").figures["probe_shrinkage"] == trust


def test_token_rates_are_released_tilt_the_words_and_take_part_in_the_labels(
    private_recipe: Callable[..., Recipe], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def recipe(**changes: dict) -> Recipe:
        chosen = {"target_gradient": SPACE | WITH_TOKENS, "generation": {"method": "written"}} | changes
        return private_recipe(ENOUGH_FOR_TOKENS, **chosen)

    record = run_first(recipe(), tmp_path, texts=True)
    released = record.stage("target_gradient")
    widths = released.read().groupby("part")["values"].agg(lambda rows: {len(row) for row in rows}).to_dict()
    (vocabulary_and_one,) = widths["token_sum"]
    assert widths["class_sum"] == {4}
    assert released.figures["token_sum_noise"] > released.figures["sigma"]
    (entry,) = releases(recipe(), tmp_path)
    assert entry.release.space == "public-subspace, centred, and a probe, and token rates"
    (frequencies,) = record.stage("target_space").read().query("part == 'document_frequency'")["values"]
    assert len(frequencies) == vocabulary_and_one - 1
    figures = record.stage("labelling").figures
    assert figures["informative_tokens"] >= 0
    assert 0 <= figures["token_slope"] <= 1
    # Another weight of the rates is post-processing of the same release; weight 0 does not read it.
    tilted = set(tmp_path.glob("stages/generation_shard/*.parquet"))
    plain = run_first(recipe(word_tilt={"strength": 0.0}), tmp_path, texts=True)
    assert plain.stage("target_gradient").cached
    assert len(releases(recipe(), tmp_path)) == 1
    untilted = set(tmp_path.glob("stages/generation_shard/*.parquet")) - tilted
    for shards, reads in ((tilted, True), (untilted, False)):
        metadata = [json.loads(pq.read_schema(shard).metadata[METADATA_KEY]) for shard in shards]
        assert [("word_tilt" in each["upstream"]) for each in metadata] == [reads] * 4
    # Too few records for token rates: the probe has their share.
    few = private_recipe(target_gradient=SPACE | WITH_TOKENS)
    allow(few, tmp_path, 9.0)
    with caplog.at_level("INFO", logger="gradmm"):
        without = run_first(few, tmp_path)
    assert any(message.startswith("no token rates: too few records for the noise") for message in caplog.messages)
    assert "token_sum" not in set(without.stage("target_gradient").read()["part"])
    assert releases(few, tmp_path)[-1].release.space == "public-subspace, centred, and a probe"


def test_a_probe_that_would_be_lost_in_the_noise_is_left_out_of_the_release(
    private_recipe: Callable[..., Recipe], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gradmm")
    by_records = SPACE | {"probe_dimensions": "auto", "probe_covariance": "records"}
    recipe = private_recipe(target_gradient=by_records)  # of 200 records
    record = run_first(recipe, tmp_path)
    assert any(message.startswith("no probe: too few records") for message in caplog.messages)
    caplog.clear()
    assert record.stage("target_space").figures["probe_dimensions"] is None
    assert set(record.stage("target_gradient").read()["part"]) == {"gradient"}
    (entry,) = releases(recipe, tmp_path)
    assert entry.release.space == "public-subspace, centred"
    # The gradient has all of C^2 then: it is the release of a recipe that asks for no probe.
    asked = private_recipe(target_gradient=SPACE | {"probe_dimensions": "auto", "probe_share": 0.0})
    same = run_first(asked, tmp_path)
    assert not any(message.startswith("no probe") for message in caplog.messages)
    assert [stage.stage for stage in same.stages if not stage.cached] == ["mechanism_audit"]
    assert releases(asked, tmp_path) == [entry]


def test_a_run_whose_unit_is_a_person_says_so_and_shares_no_ledger_with_others(
    private_recipe: Callable[..., Recipe], tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = []

    def attacked(trainer: Finetuning, texts: pd.DataFrame, own: Examples, *others: Any) -> object:
        members.append(len(own))
        return attack_texts(trainer, texts, own, *others)

    def compared(texts: pd.DataFrame, own: Sequence[str], *others: Any) -> object:
        members.append(len(own))
        return compare_texts(texts, own, *others)

    monkeypatch.setattr("gradmm.evaluation.membership.attack_texts", attacked)
    monkeypatch.setattr("gradmm.audits.memorisation.compare_texts", compared)
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    train = pd.read_parquet(data / "train.parquet")
    train["person"] = [f"p{row % 15}" for row in range(len(train))]
    train.to_parquet(data / "train.parquet")
    units = {"unit_column": "person", "rows_per_unit": 2}
    recipe = private_recipe(units, data={"path": str(data)})
    record = run(recipe, tmp_path / "root")
    assert sum(record.stage("target_gradient").figures["records"].values()) <= 2 * 15  # two classes
    assert members == [30, 30]  # of 40: those that the target was computed from
    assert record.guarantee.unit == "all records with the same 'person'"
    folder = tmp_path / "root" / "runs" / record.run_id / "release"
    card = " ".join((folder / "README.md").read_text().split())
    assert "differential privacy for all records with the same 'person' (add-or-remove)" in card
    assert "At most 2 of its records were used." in card
    assert "records of one person" not in card
    assert "epsilon_of_records" not in json.loads((folder / "privacy.json").read_text())
    (entry,) = releases(recipe, tmp_path / "root")
    assert entry.release.unit_column == "person"
    # Another largest number of rows is another release, and the guarantee is about the same units.
    allow(recipe, tmp_path / "root", 8.0)
    more = private_recipe(units | {"rows_per_unit": 3}, data={"path": str(data)})
    assert run_first(more, tmp_path / "root").guarantee.releases == 2
    before = snapshot(tmp_path / "root", "stages/target_gradient/*")
    by_record = private_recipe(data={"path": str(data)})
    with pytest.raises(InputError, match="units are named by the column 'person': guarantees for different units"):
        run_first(by_record, tmp_path / "root")
    assert snapshot(tmp_path / "root", "stages/target_gradient/*") == before


EXEMPLARS = [{"text": "a dull day .", "label": 0}, {"text": "a fine day .", "label": 1}]


def test_a_run_that_a_filter_empties_goes_on_with_other_settings_without_another_release(
    private_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    # Not calibrated, a random model takes all texts for the same class.
    strict = private_recipe(
        target_gradient=SPACE | {"probe_share": 0.0},
        label_filter={"enabled": True, "calibrated": False, "exemplars": EXEMPLARS},
    )
    with pytest.raises(InputError) as refused:
        run_first(strict, tmp_path, texts=True)
    (file,) = (tmp_path / "stages" / "label_filter").iterdir()
    assert str(file) in str(refused.value)
    assert "is left after label_filter; column `reason` says why" in refused.value.what
    assert "a run with these changes is not charged again" in refused.value.fix
    rows = pd.read_parquet(file)
    assert (rows[~rows["kept"]]["reason"] == "classified as another label").all()
    assert not rows.groupby("label")["kept"].any().all()
    (entry,) = releases(strict, tmp_path)
    relaxed = private_recipe(target_gradient=SPACE | {"probe_share": 0.0})
    record = run_first(relaxed, tmp_path, texts=True)
    assert record.stage("category_balance").figures["kept_by_label"].keys() == {"0", "1"}
    assert releases(relaxed, tmp_path) == [entry]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "label_filter": {
                    "enabled": True,
                    "exemplars": [e | {"text": e["text"] * 100} for e in EXEMPLARS],
                }
            },
            "label_filter.exemplars",
        ),
        ({"execution": {"runner": "ray"}}, r"execution.runner=ray: .*is not installed"),
        ({"finetune_eval": {"lora_rank": 2}}, "finetune_eval.lora_rank: peft is not installed"),
        (
            {"privacy": {"epsilon": 4.0, "delta": 1e-3, "sampler": "discrete"}},
            "privacy.sampler: opendp is not installed",
        ),
        (
            {"privacy": {"epsilon": 4.0, "delta": 1e-9, "declared_records": 10**8}},
            r"sums of 100,000,000 records are rounded too much; set at most 2, or privacy\.sampler=discrete",
        ),
        (
            {"privacy": {"epsilon": 4.0, "delta": 1e-9, "declared_records": 10**7, "unit_column": "person"}},
            r"sums of 10,000,000 records are rounded too much; set at most 2, or privacy\.sampler=discrete",
        ),
        ({}, r"target_\w+: takes .* GiB of memory .*, but only 0.0 GiB are available"),
        ({"data": {"test_split": "tset"}}, r"no tset\.parquet, \.csv, .* change the split names under data"),
    ],
)
def test_what_can_be_known_is_refused_before_anything_is_charged(
    private_recipe: Callable[..., Recipe],
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("prefect_ray.task_runners", "peft", "opendp"):
        monkeypatch.setitem(sys.modules, name, None)
    if not changes:
        monkeypatch.setattr(memory_plan, "_available_bytes", lambda _: 1000)
    recipe = private_recipe(**changes)
    monkeypatch.setattr(gradmm.tasks.runtime.inputs, "load_splits", lambda *_: pytest.fail("records were read"))
    with pytest.raises(InputError, match=message):
        run_first(recipe, tmp_path)
    assert releases(recipe, tmp_path) == []
    assert not list(tmp_path.glob("stages/*/*"))


def test_too_few_records_for_the_audits_are_refused_before_anything_is_charged(
    private_recipe: Callable[..., Recipe], tmp_path: Path, tiny_data: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    pd.read_parquet(data / "validation.parquet").iloc[[0, 4, 8]].to_parquet(data / "validation.parquet")
    recipe = private_recipe(data={"path": str(data)})
    with pytest.raises(InputError, match="40 rows to train and 3 to validate are too few to audit the texts with"):
        run_first(recipe, tmp_path / "root")
    assert releases(recipe, tmp_path / "root") == []


def test_runs_without_noise_or_with_a_seed_for_it_are_no_releases(
    private_recipe: Callable[..., Recipe], tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    run_first(tiny_recipe(), tmp_path)
    unsafe = private_recipe({"unsafe_noise_seed": 1})
    assert not run_first(unsafe, tmp_path).guarantee.safe
    assert releases(unsafe, tmp_path) == []


def test_the_discrete_sampler_is_charged_at_what_it_guarantees(
    private_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = private_recipe({"sampler": "discrete"})
    record = run_first(recipe, tmp_path)
    (entry,) = releases(recipe, tmp_path)
    assert entry.release.noise == "discrete-gaussian"
    assert record.guarantee.composed_epsilon == pytest.approx(4.0, rel=1e-6)
    assert "zero-concentrated" in record.guarantee.accountant


@pytest.mark.parametrize("parts", ["probe", "class sums alone", "token rates"])
def test_everything_that_is_released_of_two_neighbouring_data_sets_differs_through_the_target_only(
    private_recipe: Callable[..., Recipe],
    tmp_path: Path,
    tiny_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: str,
) -> None:
    """With the same noisy target, one record more or less changes not a byte of the release.

    Nor does it if a release of other data under the same root has been of this record too.
    """
    space, privacy, generation = SPACE, {"budget_epsilon": 99.0}, {}
    if parts == "class sums alone":
        space = SPACE | {"probe_covariance": "public"}
    if parts == "token rates":  # which tilt the words
        space, privacy, generation = SPACE | WITH_TOKENS, privacy | ENOUGH_FOR_TOKENS, {"method": "written"}
    neighbour = tmp_path / "neighbour"
    shutil.copytree(tiny_data, neighbour)
    train = pd.read_parquet(neighbour / "train.parquet")
    removed, kept = train["text"].iloc[0], train.iloc[1:]
    assert removed not in set(kept["text"])
    kept.to_parquet(neighbour / "train.parquet")

    ours = TargetSums.release

    def same_target(self: TargetSums, mechanism: GaussianMechanism) -> Released:
        if not self.text_tokens:  # canaries
            return ours(self, mechanism)
        random = torch.Generator().manual_seed(3)
        sums = torch.randn(2, 4, generator=random, dtype=torch.float64)
        moments = Moments(dict(enumerate(sums)), None, 0.5)
        if self.second_moment is not None:
            second = torch.randn(4, 4, generator=random, dtype=torch.float64)
            moments = Moments(dict(enumerate(sums)), second, 0.5, 0.5)
        values = {label: torch.randn(2, 4, generator=random) for label in (0, 1)}
        if self.token_sums is None:
            return Released(values, moments, None)
        shape = (2, len(self.token_sums[0]))
        tokens = 5 * torch.randn(shape, generator=random, dtype=torch.float64).abs()
        return Released(values, moments, TokenSums(dict(enumerate(tokens)), 0.5))

    monkeypatch.setattr(TargetSums, "release", same_target)
    monkeypatch.setattr(TargetSums, "cosines", lambda *_: {0: 0.0, 1: 0.0})
    published = []
    for name, data in {"one": tiny_data, "other": neighbour}.items():
        changes = {"data": {"path": str(data)}, "target_gradient": space, "generation": generation}
        recipe = private_recipe(privacy, **changes)
        others, plan = Ledger.of(tmp_path / name, "others"), release_plan(recipe)
        assert plan.mechanism is not None
        others.count_records([removed])
        budget = budget_of(recipe.privacy, plan.mechanism)
        with others.charge(release_of("others", plan.mechanism, plan.target), budget) as finish:
            finish("ab" * 32)
        record = run(recipe, tmp_path / name)
        assert len(Ledger.of(tmp_path / name, recipe.ledger).all_entries()) == 2 - (name == "other")
        assert record.stage("target_gradient").figures["records"]["0"] == 20 - (name == "other")
        released = {"gradient", "class_sum", "second_moment"}
        released -= {"second_moment"} if parts == "class sums alone" else set()
        released |= {"token_sum"} if parts == "token rates" else set()
        assert set(record.stage("target_gradient").read()["part"]) == released
        published.append(snapshot(tmp_path / name, f"runs/{record.run_id}/release/**/*"))
    assert set(published[0]) == RELEASE_FILES
    assert published[0] == published[1]
    assert json.loads(published[0]["privacy.json"])["releases"] == 2


def test_private_records_reach_the_stages_that_are_named_here_and_no_others(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.context import TaskRunContext

    readers = []
    original = gradmm.tasks.runtime.inputs.load_splits

    def watched(*arguments: object) -> object:
        context = TaskRunContext.get()
        readers.append(context.task.name if context else "the flow itself")
        return original(*arguments)  # pyright: ignore

    monkeypatch.setattr(gradmm.tasks.runtime.inputs, "load_splits", watched)
    monkeypatch.setattr(gradmm.tasks.runtime.inputs, "_splits", lambda *arguments: watched(*arguments))
    monkeypatch.setattr(gradmm.tasks.runtime.inputs._splits, "cache_clear", lambda: None, raising=False)
    run(private_recipe(), tmp_path)
    for_the_report = "the flow itself"  # compares the texts with real ones
    assert list(dict.fromkeys(readers)) == [
        "dataset_fingerprint",
        "count_records",
        *READ_PRIVATE_DATA,
        for_the_report,
    ]


def test_a_private_run_is_told_what_to_expect_before_it_is_charged(
    private_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stop(BaseException):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Stop

    monkeypatch.setattr(Ledger, "charge", stop)
    written = {"generation": {"method": "written"}, "target_gradient": SPACE | {"probe_dimensions": "auto"}}
    recipe = private_recipe({"epsilon": 0.05, "declared_records": 20}, **written)
    with pytest.raises(Stop), caplog.at_level("INFO", logger="gradmm"):
        run_first(recipe, tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    expected = [line for line in lines if line.startswith("expected cosine of noisy and clean target, ")]
    assert len(expected) == 2
    assert any(line.startswith("WARNING: most of this target will be noise") for line in lines)
    assert any(line.startswith("WARNING: this release would be charged, but not be used") for line in lines)


def test_what_is_wrong_with_the_data_is_said_before_anything_is_computed(
    private_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradmm.target import target_space

    monkeypatch.setattr(target_space, "public_texts", lambda *_: pytest.fail("public texts were written"))
    recipe = private_recipe({"epsilon": None}, data={"path": str(tmp_path / "nowhere")})
    with pytest.raises(InputError, match="cannot be listed"):
        run_first(recipe, tmp_path / "root")


def test_figures_of_private_data_are_in_the_private_part_only(
    private_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    record = run(private_recipe(), tmp_path)
    folder = tmp_path / "runs" / record.run_id
    private_stages = ("target_gradient", "finetune_eval", "mia_audit", "memorisation")
    figures = {
        f"{stage}.{name}": value
        for stage in private_stages
        for name, value in leaves(record.stage(stage).figures)
        # Others, such as 0.5, can be equal by chance.
        if isinstance(value, float) and math.isfinite(value) and value != round(value, 4)
    }
    del figures["target_gradient.sigma"]  # of the mechanism
    assert {name.partition(".")[0] for name in figures} >= {*private_stages} - {"finetune_eval"}
    own = (folder / "run.json").read_text()
    for name, value in figures.items():
        assert str(value) in own, name
    files = [file for file in (folder / "release").rglob("*") if file.is_file()]
    assert {file.relative_to(folder / "release").as_posix() for file in files} == RELEASE_FILES
    for file in files:
        if file.suffix == ".parquet":
            numbers = pd.read_parquet(file).select_dtypes("number").to_numpy(dtype=float).ravel()
            close = {name for name, value in figures.items() if np.isclose(numbers, value, rtol=1e-9).any()}
        else:
            text = file.read_text()
            close = {name for name, value in figures.items() if f"{value:.5g}" in text or str(value) in text}
        assert not close, file.name


def snapshot(root: Path, pattern: str) -> dict[str, bytes]:
    """Return the contents of files by their paths below the last folder that the pattern names."""
    beginning = root / pattern.partition("*")[0]
    return {
        file.relative_to(beginning).as_posix(): file.read_bytes()
        for file in sorted(root.glob(pattern))
        if file.is_file()
    }
