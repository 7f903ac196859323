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
from itertools import islice

from prefect.artifacts import create_markdown_artifact

from flows.stage_runs import StageRuns
from flows.texts import Aim, filtered_texts, generated_texts, release_target, stage_runs
from flows.trials import Plan, Trial, repeating, searching
from flows.ui_artifacts import UiArtifacts, artifact_key, never_failing
from gradmm_core.arm_recipes import equal_draws, few_shot, rerank, with_epsilon, zero_shot
from gradmm_core.arms import PRODUCT, Arm, class_counts
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


#: What the texts of an arm come from, by seed; None where they are random rows.
Made = Mapping[int, StageArtifact] | None


@dataclass(frozen=True)
class Version:
    """A way of making texts for an aim, which every seed goes by itself.

    Attributes:
        runs: shows the first seed's stages in Prefect's UI; `quiet` has those of all others.
    """

    runs: StageRuns
    quiet: StageRuns
    recipe: Recipe
    aim: Aim
    seeds: tuple[int, ...]

    @cached_property
    def generated(self) -> dict[int, StageArtifact]:
        """The texts before any filter, by seed."""
        return {seed: generated_texts(*self._of(seed), self.aim) for seed in self.seeds}

    @cached_property
    def texts(self) -> dict[int, StageArtifact]:
        """What all filters leave, by seed."""
        return {seed: filtered_texts(*self._of(seed), self.aim, made) for seed, made in self.generated.items()}

    @property
    def guarantee(self) -> Guarantee:
        return composed_guarantee(self.recipe.privacy, self.runs.context)

    def _of(self, seed: int) -> tuple[StageRuns, Recipe]:
        runs = self.runs if seed == self.seeds[0] else self.quiet
        return runs, self.recipe.model_copy(update={"seed": seed})


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

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.recipe.finetune_eval.seeds

    @cached_property
    def aim(self) -> Aim:
        """The recipe's own."""
        return release_target(self.runs, self.recipe)

    @cached_property
    def product(self) -> Version:
        """The recipe as it is."""
        return Version(self.runs, self.quiet, self.recipe, self.aim, self.seeds)

    def version(self, name: str, recipe: Recipe) -> Version:
        """Another recipe's target, released from the same data: in a private run one more release."""
        runs = stage_runs(self.asked, recipe, self.root)
        # The data and the budget are the study's.
        runs.context = runs.context.model_copy(update={"recipe": self.recipe.name})
        runs.ui = self._pages(recipe, name)
        self._parts.append(runs)
        return Version(runs, self.quiet, recipe, release_target(runs, recipe), self.seeds)

    def of_rows(self, rows: int, seed: int) -> Version:
        """The recipe with the target of random rows alone, for the seed that draws them; see `release_target`."""
        aim = release_target(self.quiet, self.recipe, (rows, seed))
        return Version(self.quiet, self.quiet, self.recipe, aim, (seed,))

    def private(self, epsilon: float) -> Version:
        """For the product's arm under a guarantee."""
        return self.version(f"epsilon-{epsilon:g}", with_epsilon(self.recipe, epsilon))

    def made(self, arm: Arm) -> Made:
        """What the texts of an arm of `ARMS` come from, for the recipe's own aim."""
        if arm.name == PRODUCT:
            return self.product.texts
        if arm.source == "coreset":
            # As many as any size could ask for: another size is not to select anew.
            most = self.recipe.loss_selection.per_class
            data = {"train": self.aim.data.train, "model": self.aim.model, "wording": self.aim.wording}
            return dict.fromkeys(self.seeds, self.runs.run(coresets, **data, per_class=most))
        if arm.source not in ("synthetic", "written"):
            return None
        runs = StageRuns(self.runs.context, self._pages(self.recipe, arm.name))
        self._parts.append(runs)
        return Version(runs, self.quiet, self._written(arm), self.aim, self.seeds).texts

    def _written(self, arm: Arm) -> Recipe:
        """The recipe of an arm whose texts the model writes."""
        if arm.name != "rerank":
            return few_shot(self.recipe) if arm.name == "few-shot" else zero_shot(self.recipe)
        first = self.seeds[0]
        one, two = (generated_texts(self.quiet, _few_texts(rerank(self.recipe, n)), self.aim) for n in (1, 2))
        made = (self.product.generated[first], one, two)
        draws = equal_draws(*(each.figures["token_passes_per_text"] for each in made))
        logger.info("rerank chooses among %d texts, which cost as much as one of %s", draws, PRODUCT)
        return rerank(self.recipe, draws)

    def _pages(self, recipe: Recipe, name: str) -> UiArtifacts:
        """By a name that they have to themselves."""
        own = "".join(letter if letter.isalnum() else "-" for letter in f"{recipe.name}-{name}".lower())
        return UiArtifacts(recipe.model_copy(update={"name": own}), self.root)

    def trials(self, arm: Arm, made: Made, sizes: Sequence[int]) -> list[list[Trial]]:
        """Every seed on its own texts: a list for each of the arm's sizes. Before fine-tuning, one seed."""
        seeds = self.seeds if arm.source != "nothing" else self.seeds[:1]
        return [
            [self.trial(self.aim, arm, None if made is None else made[seed], size, seed) for seed in seeds]
            for size in arm.sizes(sizes)
        ]

    def trial(self, aim: Aim, arm: Arm, made: StageArtifact | None, size: int, seed: int) -> Trial:
        return Trial(aim, arm, made, class_counts(size, self.runs.context.labels), seed)

    def evaluate(self, plan: Plan) -> list[list[StageArtifact]]:
        """Fine-tunes on each trial. The first of each list tries all learning rates, others take its choice."""
        settings, execution = self.recipe.finetune_eval, self.recipe.execution
        searched = self.quiet.run_each(arm_eval, searching(plan, settings), execution)
        rounds = repeating(plan, settings, searched)
        repeated = iter(self.quiet.run_each(arm_eval, [each for of_list in rounds for each in of_list], execution))
        return [[one, *islice(repeated, len(rest))] for one, rest in zip(searched, rounds, strict=True)]

    def measures(self, arm: Arm, made: Made, sizes: Sequence[int]) -> StageArtifact:
        """How an arm's texts read."""
        aim = self.aim
        return self.quiet.run(
            arm_measures,
            arm=arm,
            made=None if made is None else [made[seed] for seed in self.seeds],
            sizes=list(sizes),
            seeds=list(self.seeds),
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
            seeds=self.seeds,
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


def _few_texts(recipe: Recipe) -> Recipe:
    """Of each class: enough to see what one costs on average, as texts differ in length."""
    few = min(20, recipe.generation.per_class)
    return recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"per_class": few})})
