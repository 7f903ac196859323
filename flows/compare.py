"""The flow `compare`: the product's texts against baselines, at several sizes, over seeds (the paper's Table 1).

It goes through the stages of `flows.texts`, under the same keys: what a run of the recipe has made is not made
again. Every fine-tuning is a task of its own, so that a comparison that was stopped goes on where it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.stage_runs import StageRuns
from flows.texts import (
    Aim,
    filtered_texts,
    generated_texts,
    release_target,
    stage_runs,
    synthetic_texts,
)
from flows.ui_artifacts import UiArtifacts, artifact_key, never_failing
from flows.ui_logs import logs_in_ui
from gradmm_core.arm_recipes import check_plan, equal_draws, few_shot, rerank, sizes_of, with_epsilon, zero_shot
from gradmm_core.arms import ARMS, PRODUCT, Arm, private_arm
from gradmm_core.artifacts import Root, StageArtifact
from gradmm_core.compare_record import CompareRecord, comparison_page, source_commit, write_comparison
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.run_record import StageRecord, library_versions
from tasks.arm_eval import arm_eval
from tasks.arm_measures import arm_measures
from tasks.compare import compare as compare_stage
from tasks.coresets import coresets
from tasks.inputs import demo_material
from tasks.privacy_budget import composed_guarantee

logger = logging.getLogger("gradmm_core.flow")


@flow(name="gradmm-compare", persist_result=False)
def compare(
    recipe: Recipe,
    root: Location = Path("gradmm-root"),
    sizes: tuple[int, ...] | None = None,
    arms: tuple[str, ...] = tuple(ARMS),
    epsilons: tuple[float, ...] = (),
    command: tuple[str, ...] = (),
) -> CompareRecord:
    """Fine-tunes on every arm at every size and with every seed, and tabulates what each is worth.

    Args:
        recipe: its `finetune_eval.seeds` are the seeds.
        root: the folder, or the URL in an object store, that keeps stages and runs.
        sizes: how many texts, in all; by default the paper's, as far as the recipe can fill them. An arm's are the
            first of its own order, as evenly over the classes as it goes, so that one generation serves all sizes.
        arms: names of `gradmm_core.arms.ARMS`; the product's own is always among them.
        epsilons: the product's arm with these guarantees too, each of them one release from the data.
        command: what started it, for the record.
    """
    with logs_in_ui():
        sizes = sizes_of(recipe) if sizes is None else sizes
        return run_comparison(recipe, root, sorted(set(sizes)), arms, sorted(set(epsilons)), command)


def run_comparison(
    asked: Recipe,
    root_path: Location,
    sizes: Sequence[int],
    arms: Sequence[str],
    epsilons: Sequence[float],
    command: Sequence[str],
) -> CompareRecord:
    """All arms of one recipe; what is cached is not run again."""
    check_plan(asked, sizes, arms, epsilons)
    began, clock = datetime.now(UTC), time.perf_counter()
    root = Root(path=root_path.expanduser().resolve())
    root.prepare()
    recipe = demo_material(asked, root)
    runs = stage_runs(asked, recipe, root)
    aim = release_target(runs, recipe)
    # All releases first: one that the budget refuses is to be told before hours of work.
    private = {epsilon: _release(asked, recipe, root, epsilon) for epsilon in epsilons}
    made: dict[Arm, StageArtifact | None] = {}
    own = generated_texts(runs, recipe, aim)
    for arm in (each for name, each in ARMS.items() if name in arms or name == PRODUCT):
        if arm.name == PRODUCT:
            made[arm] = filtered_texts(runs, recipe, aim, own)
        elif arm.source in ("synthetic", "written"):
            made[arm] = _baseline_texts(runs, recipe, aim, arm, own)
        elif arm.source == "coreset":
            # As many as any size could ask for: another size is not to select anew.
            most = recipe.loss_selection.per_class
            data = {"train": aim.data.train, "model": aim.model, "wording": aim.wording}
            made[arm] = runs.run(coresets, **data, per_class=most)
        else:
            made[arm] = None
    for epsilon, (its_runs, its_recipe, its_aim) in private.items():
        made[private_arm(epsilon)] = synthetic_texts(its_runs, its_recipe, its_aim)
        runs.records.extend(its_runs.records)
    quiet = StageRuns(runs.context, _WithoutPages(recipe, root))
    evaluations = _evaluations(quiet, recipe, aim, made, sizes)
    measures = [
        _measures(quiet, recipe, aim, arm, texts, arm.sizes(sizes))
        for arm, texts in made.items()
        if arm.source != "nothing"
    ]
    runs.records.extend(quiet.records)
    runs.run(compare_stage, evaluations=evaluations, measures=measures)
    record = CompareRecord(
        run_id=f"{began:%Y%m%dT%H%M%SZ}-{recipe.name}-compare",
        recipe=asked,
        guarantee=composed_guarantee(recipe.privacy, runs.context),
        data=aim.data.model_dump(mode="json"),
        model=aim.model.model_dump(mode="json"),
        started=began,
        seconds=time.perf_counter() - clock,
        versions=library_versions(),
        stages=runs.records,
        command=tuple(command),
        commit=source_commit(),
        arms=tuple(arm.name for arm in made),
        sizes=tuple(sizes),
        seeds=recipe.finetune_eval.seeds,
        guarantees={
            private_arm(epsilon).name: composed_guarantee(its_recipe.privacy, its_runs.context)
            for epsilon, (its_runs, its_recipe, _) in private.items()
        },
    )
    record = write_comparison(root, record)
    with never_failing("the comparison"):
        create_markdown_artifact(
            comparison_page(record),
            key=artifact_key(recipe.name, "comparison"),
            description="What each arm is worth for fine-tuning",
        )
    return record


class _WithoutPages(UiArtifacts):
    """Hundreds of fine-tunings get no page each: the comparison's own has them all."""

    def show_stage(self, records: Sequence[StageRecord]) -> None:
        pass


def _release(asked: Recipe, recipe: Recipe, root: Root, epsilon: float) -> tuple[StageRuns, Recipe, Aim]:
    """The target with noise, for the product's arm under a guarantee."""
    private = with_epsilon(recipe, epsilon)
    runs = stage_runs(asked, _named(private, f"epsilon-{epsilon:g}"), root)
    runs.context = runs.context.model_copy(update={"recipe": recipe.name})
    return runs, private, release_target(runs, private)


def _baseline_texts(runs: StageRuns, recipe: Recipe, aim: Aim, arm: Arm, own: StageArtifact) -> StageArtifact:
    """Texts of another way of writing, through the same filters, for the same target."""
    its_runs = StageRuns(runs.context, UiArtifacts(_named(recipe, arm.name), runs.context.root))
    if arm.name == "rerank":
        passes = [own, *(generated_texts(its_runs, _one_text(rerank(recipe, draws)), aim) for draws in (1, 2))]
        draws = equal_draws(*(each.figures["token_passes_per_text"] for each in passes))
        logger.info("rerank chooses among %d texts, which cost as much as one of %s", draws, PRODUCT)
        recipe = rerank(recipe, draws)
    else:
        recipe = few_shot(recipe) if arm.name == "few-shot" else zero_shot(recipe)
    texts = synthetic_texts(its_runs, recipe, aim)
    runs.records.extend(its_runs.records)
    return texts


def _named(recipe: Recipe, arm: str) -> Recipe:
    """By a name that its pages in Prefect's UI have to themselves."""
    return recipe.model_copy(update={"name": f"{recipe.name}-{arm}".replace(".", "-")})


def _one_text(recipe: Recipe) -> Recipe:
    """Of each class: enough to see what it costs."""
    return recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"per_class": 1})})


def _evaluations(
    runs: StageRuns,
    recipe: Recipe,
    aim: Aim,
    made: Mapping[Arm, StageArtifact | None],
    sizes: Sequence[int],
) -> list[StageArtifact]:
    """Of every arm, size and seed. The first seed tries all learning rates, the others take what it chose."""
    settings = recipe.finetune_eval
    first, *others = settings.seeds

    def asked(arm: Arm, size: int, seed: int, learning_rates: tuple[float, ...]) -> dict[str, Any]:
        return {
            "arm": arm,
            "made": made[arm],
            "size": size,
            "train": aim.data.train,
            "validation": aim.data.validation,
            "test": aim.data.test,
            "model": aim.model,
            "wording": aim.wording,
            "settings": settings.model_copy(update={"seeds": (seed,), "learning_rates": learning_rates}),
            "held_out_seed": first,
        }

    plan = [(arm, size) for arm in made for size in arm.sizes(sizes)]
    searching = [asked(arm, size, first, settings.learning_rates) for arm, size in plan]
    searched = runs.run_each(arm_eval, searching, recipe.execution)
    repeating = []
    for (arm, size), one in zip(plan, searched, strict=True):
        if arm.source == "nothing":
            continue
        if one.figures["texts"] < size:
            logger.warning("%s has %d texts fewer than %d", arm.name, size - one.figures["texts"], size)
        repeating += [asked(arm, size, seed, (one.figures["learning_rate"],)) for seed in others]
    return [*searched, *runs.run_each(arm_eval, repeating, recipe.execution)]


def _measures(
    runs: StageRuns, recipe: Recipe, aim: Aim, arm: Arm, made: StageArtifact | None, sizes: Sequence[int]
) -> StageArtifact:
    return runs.run(
        arm_measures,
        arm=arm,
        made=made,
        sizes=list(sizes),
        seeds=list(recipe.finetune_eval.seeds),
        train=aim.data.train,
        test=aim.data.test,
        model=aim.model,
        wording=aim.wording,
    )
