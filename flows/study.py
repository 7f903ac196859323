"""What all studies have in common: a recipe's aim, arms to hold against it, fine-tunings, and the record.

A study goes through the stages of `flows.texts`, under the same keys: what a run of the recipe has made is not
made again. Every fine-tuning is a task of its own, so that a study that was stopped goes on where it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from prefect.artifacts import create_markdown_artifact

from flows.stage_runs import StageRuns
from flows.texts import Aim, filtered_texts, generated_texts, release_target, stage_runs, synthetic_texts
from flows.ui_artifacts import UiArtifacts, artifact_key, never_failing
from gradmm_core.arm_recipes import equal_draws, few_shot, rerank, with_epsilon, zero_shot
from gradmm_core.arms import PRODUCT, Arm
from gradmm_core.artifacts import Root, StageArtifact
from gradmm_core.location import Location
from gradmm_core.privacy import Guarantee
from gradmm_core.recipe import Recipe
from gradmm_core.run_record import StageRecord, library_versions
from gradmm_core.study_record import StudyRecord, machine, source_commit, write_study
from tasks.arm_eval import arm_eval
from tasks.arm_measures import arm_measures
from tasks.coresets import coresets
from tasks.inputs import demo_material
from tasks.privacy_budget import composed_guarantee

logger = logging.getLogger("gradmm_core.flow")


@dataclass(frozen=True)
class Trial:
    """An arm's texts at one size, as one seed fine-tunes on them. `made` is None where they are random rows."""

    aim: Aim
    arm: Arm
    made: StageArtifact | None
    size: int
    seed: int


@dataclass(frozen=True)
class Version:
    """The recipe with other settings, and an aim of its own: in a private run one more release."""

    runs: StageRuns
    recipe: Recipe
    aim: Aim

    def texts(self) -> StageArtifact:
        return synthetic_texts(self.runs, self.recipe, self.aim)

    @property
    def guarantee(self) -> Guarantee:
        return composed_guarantee(self.recipe.privacy, self.runs.context)


class Study:
    """One study of a recipe under a root.

    Args:
        name: of its flow, and of the stage with its table.
        command: what started it, for the record.
    """

    def __init__(self, name: str, asked: Recipe, root: Location, command: Sequence[str]) -> None:
        self._began, self._clock = datetime.now(UTC), time.perf_counter()
        self.name, self.asked, self._command = name, asked, tuple(command)
        self.root = Root(path=root.resolve())
        self.root.prepare()
        self.recipe = demo_material(asked, self.root)
        self.runs = stage_runs(asked, self.recipe, self.root)
        # Hundreds of fine-tunings get no page each: the study's own has them all.
        self.quiet = StageRuns(self.runs.context, _WithoutPages(self.recipe, self.root))
        self._parts = [self.runs, self.quiet]

    @cached_property
    def aim(self) -> Aim:
        """The recipe's own."""
        return release_target(self.runs, self.recipe)

    def version(self, name: str, recipe: Recipe, drawn: tuple[int, int] | None = None) -> Version:
        """Another recipe's target, released from the same data, with pages of its own in Prefect's UI.

        Args:
            drawn: see `release_target`. Without pages, as there are many.
        """
        runs = stage_runs(self.asked, _named(recipe, name), self.root)
        if drawn:
            runs.ui = _WithoutPages(recipe, self.root)
        # The data and the budget are the study's, under whatever name and seed texts are generated.
        runs.context = runs.context.model_copy(update={"recipe": self.recipe.name, "seed": self.recipe.seed})
        self._parts.append(runs)
        return Version(runs, recipe, release_target(runs, recipe, drawn))

    def private(self, epsilon: float) -> Version:
        """For the product's arm under a guarantee."""
        return self.version(f"epsilon-{epsilon:g}", with_epsilon(self.recipe, epsilon))

    def made(self, arm: Arm) -> StageArtifact | None:
        """What the texts of an arm of `ARMS` come from, for the recipe's own aim; None for random rows."""
        if arm.name == PRODUCT:
            return self.texts
        if arm.source == "coreset":
            # As many as any size could ask for: another size is not to select anew.
            most = self.recipe.loss_selection.per_class
            data = {"train": self.aim.data.train, "model": self.aim.model, "wording": self.aim.wording}
            return self.runs.run(coresets, **data, per_class=most)
        if arm.source not in ("synthetic", "written"):
            return None
        runs = StageRuns(self.runs.context, UiArtifacts(_named(self.recipe, arm.name), self.root))
        self._parts.append(runs)
        if arm.name != "rerank":
            recipe = few_shot(self.recipe) if arm.name == "few-shot" else zero_shot(self.recipe)
            return synthetic_texts(runs, recipe, self.aim)
        one, two = (generated_texts(runs, _one_text(rerank(self.recipe, draws)), self.aim) for draws in (1, 2))
        draws = equal_draws(*(each.figures["token_passes_per_text"] for each in (self.own, one, two)))
        logger.info("rerank chooses among %d texts, which cost as much as one of %s", draws, PRODUCT)
        return synthetic_texts(runs, rerank(self.recipe, draws), self.aim)

    @cached_property
    def own(self) -> StageArtifact:
        """What the recipe's own way of generating writes, before any filter."""
        return generated_texts(self.runs, self.recipe, self.aim)

    @cached_property
    def texts(self) -> StageArtifact:
        """The product's, as the recipe has them."""
        return filtered_texts(self.runs, self.recipe, self.aim, self.own)

    def trials(self, arm: Arm, made: StageArtifact | None, sizes: Sequence[int]) -> list[list[Trial]]:
        """On the same texts with every seed: a list for each of the arm's sizes."""
        seeds = self.recipe.finetune_eval.seeds
        return [[Trial(self.aim, arm, made, size, seed) for seed in seeds] for size in arm.sizes(sizes)]

    def evaluate(self, plan: Sequence[Sequence[Trial]]) -> list[list[StageArtifact]]:
        """Fine-tunes on each trial. The first of each list tries all learning rates, others take its choice."""
        settings = self.recipe.finetune_eval

        def asked(trial: Trial, learning_rates: tuple[float, ...]) -> dict[str, Any]:
            return {
                "arm": trial.arm,
                "made": trial.made,
                "size": trial.size,
                "train": trial.aim.data.train,
                "validation": trial.aim.data.validation,
                "test": trial.aim.data.test,
                "model": trial.aim.model,
                "wording": trial.aim.wording,
                "settings": settings.model_copy(update={"seeds": (trial.seed,), "learning_rates": learning_rates}),
                "held_out_seed": settings.seeds[0],
            }

        execution = self.recipe.execution
        searching = [asked(trials[0], settings.learning_rates) for trials in plan]
        searched = self.quiet.run_each(arm_eval, searching, execution)
        repeating, owners = [], []
        for number, (trials, one) in enumerate(zip(plan, searched, strict=True)):
            first = trials[0]
            if one.figures["texts"] < first.size:
                short = first.size - one.figures["texts"]
                logger.warning("%s has %d texts fewer than %d", first.arm.name, short, first.size)
            if first.arm.source != "nothing":
                repeating += [asked(trial, (one.figures["learning_rate"],)) for trial in trials[1:]]
                owners += [number] * (len(trials) - 1)
        evaluated = [[one] for one in searched]
        for number, one in zip(owners, self.quiet.run_each(arm_eval, repeating, execution), strict=True):
            evaluated[number].append(one)
        return evaluated

    def measures(self, arm: Arm, made: StageArtifact | None, sizes: Sequence[int]) -> StageArtifact:
        """How an arm's texts read."""
        aim = self.aim
        return self.quiet.run(
            arm_measures,
            arm=arm,
            made=made,
            sizes=list(sizes),
            seeds=list(self.recipe.finetune_eval.seeds),
            train=aim.data.train,
            test=aim.data.test,
            model=aim.model,
            wording=aim.wording,
        )

    def finish(
        self, arms: Sequence[str], sizes: Sequence[int], guarantees: Mapping[str, Guarantee] | None = None
    ) -> StudyRecord:
        """Writes the record with its tables and pictures, after the study's own stage has run."""
        from gradmm_core.study_pages import study_page, study_pictures

        recipe = self.recipe
        record = StudyRecord(
            run_id=f"{self._began:%Y%m%dT%H%M%SZ}-{recipe.name}-{self.name}",
            recipe=self.asked,
            guarantee=composed_guarantee(recipe.privacy, self.runs.context),
            data=self.aim.data.model_dump(mode="json"),
            model=self.aim.model.model_dump(mode="json"),
            started=self._began,
            seconds=time.perf_counter() - self._clock,
            versions=library_versions(),
            stages=[record for runs in self._parts for record in runs.records],
            study=self.name,
            command=self._command,
            commit=source_commit(),
            machine=machine(),
            arms=tuple(arms),
            sizes=tuple(sizes),
            seeds=recipe.finetune_eval.seeds,
            guarantees=dict(guarantees or {}),
        )
        record = write_study(self.root, record, study_page(record), study_pictures(record))
        with never_failing(f"the study {self.name}"):
            create_markdown_artifact(
                study_page(record),
                key=artifact_key(recipe.name, "comparison" if self.name == "compare" else self.name),
                description="What each arm is worth",
            )
        return record


class _WithoutPages(UiArtifacts):
    def show_stage(self, records: Sequence[StageRecord]) -> None:
        pass


def _named(recipe: Recipe, arm: str) -> Recipe:
    """By a name that its pages in Prefect's UI have to themselves."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{recipe.name}-{arm}".lower())
    return recipe.model_copy(update={"name": name})


def _one_text(recipe: Recipe) -> Recipe:
    """Of each class: enough to see what it costs."""
    return recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"per_class": 1})})
