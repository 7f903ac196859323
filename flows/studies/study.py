"""The parts that all studies share: target context, arms, fine-tuning and the record.

A study runs the stages of `gradmm.flows.pipeline` under the same cache keys, so it reuses the results of a run of
the recipe. Every fine-tuning is a task of its own, so that a stopped study resumes where it was.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain, islice

from prefect import Task
from prefect.artifacts import create_markdown_artifact

from gradmm.config.recipe import Recipe
from gradmm.data.examples import class_counts
from gradmm.errors import InputError
from gradmm.evaluation.arm import ALL_ROWS, CALIBRATED, Arm
from gradmm.flows.finetune_plan import Plan, Trial, repeating, searching
from gradmm.flows.pipeline import (
    TargetContext,
    filtered_texts,
    fitted_words,
    generated_texts,
    labelled_texts,
    release_target,
    stage_runs,
)
from gradmm.flows.runtime.stage_runs import StageRuns
from gradmm.flows.studies.rivals import Rival
from gradmm.flows.ui.artifacts import UiArtifacts, artifact_key, never_failing
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.outputs.record import StageRecord, library_versions
from gradmm.privacy.guarantee import Guarantee
from gradmm.storage.artifacts import Root, StageArtifact
from gradmm.storage.location import Location
from gradmm.studies.arm_recipes import (
    equal_draws,
    few_shot,
    few_texts,
    rerank,
    soft_zero_shot,
    with_epsilon,
    written,
    zero_shot,
)
from gradmm.studies.arms import (
    ARMS,
    PRODUCT,
    RIVALS,
    SOFT_ZERO_SHOT,
    PrivateEvolution,
    private_arm,
)
from gradmm.studies.pages import study_page, study_pictures
from gradmm.studies.plans import all_texts, planned_releases
from gradmm.studies.record import StudyRecord, machine, source_commit, write_study
from gradmm.tasks.finetune_eval import arm_eval
from gradmm.tasks.mechanism_audit import mechanism_audit
from gradmm.tasks.runtime.inputs import (
    dataset_fingerprint,
    demo_material,
    drawn_rows,
    model_fingerprint,
    read_split,
)
from gradmm.tasks.runtime.privacy_budget import composed_guarantee, count_records, releases_budget
from gradmm.tasks.studies.arm_measures import arm_measures
from gradmm.tasks.studies.coresets import coresets
from gradmm.tasks.studies.rivals_check import rivals_check
from gradmm.tasks.studies.tfidf_eval import tfidf_eval

logger = logging.getLogger("gradmm.flow")

#: Texts per class of generations that are not trained on. Enough for a mean cost, as texts differ in length.
TRIAL_TEXTS = 20

#: The source of an arm's texts, by seed; None if they are random rows or there are none.
Texts = Mapping[int, StageArtifact] | None


@dataclass(frozen=True)
class Variant:
    """A variant of the recipe with its target. Every seed generates its own texts.

    Attributes:
        runs: shows the stages of the first seed in Prefect's UI; `quiet` runs those of all others.
    """

    runs: StageRuns
    quiet: StageRuns
    recipe: Recipe
    target_context: TargetContext
    seeds: tuple[int, ...]

    @cached_property
    def generated(self) -> dict[int, StageArtifact]:
        """The texts before all filters, by seed."""
        return {seed: generated_texts(*self._seeded(seed), self.target_context) for seed in self.seeds}

    @cached_property
    def texts(self) -> dict[int, StageArtifact]:
        """The labelled texts after all filters, by seed."""
        return {seed: self._labelled(seed, generated) for seed, generated in self.generated.items()}

    def _labelled(self, seed: int, generated: StageArtifact) -> StageArtifact:
        runs, recipe = self._seeded(seed)
        return labelled_texts(
            runs, recipe, self.target_context, filtered_texts(runs, recipe, self.target_context, generated)
        )

    @property
    def passes_per_text(self) -> float:
        """Token passes for each text that the first seed generated, with its share of fitting the words."""
        first = self.seeds[0]
        words = fitted_words(self.quiet, self._seeded(first)[1], self.target_context)
        fitting = words.figures["token_passes"] / self.generated[first].rows if words else 0.0
        return self.generated[first].figures["token_passes_per_text"] + fitting

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the variant's texts, composed with all earlier releases."""
        return composed_guarantee(self.recipe.privacy, self.runs.plan, self.runs.context)

    def _seeded(self, seed: int) -> tuple[StageRuns, Recipe]:
        runs = self.runs if seed == self.seeds[0] else self.quiet
        return runs, self.recipe.model_copy(update={"seed": seed})


class Study:
    """One study of a recipe under a root.

    Args:
        name: of the flow, and of the stage with the study's table.
        requested: the recipe before the folders of the demo are filled in.
        command: the command line, for the record.

    Raises:
        InputError: if the recipe draws a new target in every run.
    """

    def __init__(self, name: str, requested: Recipe, root: Location, command: Sequence[str]) -> None:
        if requested.privacy.redraw:
            problem = "a study compares texts from one target, and would draw and charge another for each variant"
            raise InputError(problem, "privacy.redraw", "set it to false for a study")
        self._began, self._clock = datetime.now(UTC), time.perf_counter()
        self.name, self.requested, self._command = name, requested, tuple(command)
        self.root = Root(path=root.resolve())
        self.root.prepare()
        self.recipe = demo_material(requested, self.root)
        self.size, self.seeds = all_texts(self.recipe), self.recipe.finetune_eval.seeds
        self.runs = stage_runs(requested, self.recipe, self.root)
        # Without UI pages: there are hundreds of fine-tunings, and the study's page has them all.
        plan = self.runs.plan
        self.quiet = StageRuns(self.runs.context, plan, _WithoutPages(self.recipe, plan, self.root))
        self._parts = [self.runs, self.quiet]
        self._variants = {PRODUCT: self.runs}

    @cached_property
    def target_context(self) -> TargetContext:
        """The target of the recipe itself."""
        return release_target(self.runs, self.recipe)

    @cached_property
    def product(self) -> Variant:
        """The recipe itself."""
        return Variant(self.runs, self.quiet, self.recipe, self.target_context, self.seeds)

    def variant(self, name: str, recipe: Recipe, arm: str | None = None) -> Variant:
        """Release the target of another recipe from the same data: one more release in a private run."""
        runs = self._variant_runs(name, recipe, arm)
        return Variant(runs, self.quiet, recipe, release_target(runs, recipe), self.seeds)

    def check_budget(self, variants: Sequence[Recipe], arms: Iterable[str] = ()) -> None:
        """Refuse the study if its releases together would exceed the privacy budget.

        Args:
            variants: recipes whose targets are released beside the study's own.
            arms: of these, the rivals release under the guarantee of each variant.

        Raises:
            BudgetExhausted: if they would.
        """
        private = [self.recipe, *variants]
        charged = [runs for each in private if (runs := stage_runs(self.requested, each, self.root)).plan.charged]
        if charged:  # the first release sets the budget, unless the data's owner has
            releases_budget(charged[0].context, planned_releases(self.recipe, variants, arms))

    def check_rivals(self, names: Iterable[str]) -> None:
        """Refuse the study if its model does not suit a rival.

        Raises:
            InputError: if it does not.
        """
        if rivals := tuple(name for name in names if name in RIVALS):
            recipe, tokens = self.recipe, self.recipe.generation.text_tokens
            assert tokens != "auto"  # of private data, which no rival's recipe may depend on
            model, template = model_fingerprint(recipe.model), PromptTemplate.of(recipe)
            rivals_check(self.runs.context, rivals, model, template, recipe.instructions, tokens)

    def private(self, epsilon: float) -> Variant:
        """Release the recipe's target under a guarantee."""
        return self.variant(f"epsilon-{epsilon:g}", with_epsilon(self.recipe, epsilon), private_arm(epsilon).name)

    def rival(self, name: str, epsilon: float) -> dict[Arm, Texts]:
        """Release by another method under a guarantee, once, and let every seed write texts from it.

        Returns:
            Two arms of the same texts: with the labels that they were written for, and labelled by the calibrated
            model, with the classes' shares where the release counts them.
        """
        settings = RIVALS[name]
        factor = 1 + settings.variations if isinstance(settings, PrivateEvolution) else 1
        recipe = written(with_epsilon(self.recipe, epsilon), factor)
        runs = self._variant_runs(f"{name}-{epsilon:g}", recipe, private_arm(epsilon, name).name)
        context = self.target_context
        count_records(runs.context, context.data.train)
        per_class = self.recipe.texts_per_class
        rival = Rival(runs, self.quiet, recipe, context, per_class, settings, self.seeds)
        return {
            private_arm(epsilon, name): rival.labelled("hard"),
            private_arm(epsilon, f"{name}, soft labels"): rival.labelled("soft"),
        }

    def check_rows(self, rows: int) -> None:
        """Check that train has enough rows of each class for a draw.

        Raises:
            InputError: if a class has fewer rows than the draw takes.
        """
        train = dataset_fingerprint(self.runs.context).train
        drawn = drawn_rows(self.runs.context, train, rows, seed=0).rows
        if drawn < rows:
            problem = f"{rows:,} rows, as evenly over the classes as possible, are {drawn:,} of train"
            raise InputError(problem, "rows", "ask for fewer")

    def from_rows(self, rows: int, seed: int) -> Variant:
        """Compute the recipe's target from `rows` random train rows, drawn by the seed."""
        target_context = release_target(self.quiet, self.recipe, (rows, seed))
        return Variant(self.quiet, self.quiet, self.recipe, target_context, (seed,))

    def arms(self, names: Iterable[str]) -> dict[Arm, Texts]:
        """Make the texts of the named arms of `ARMS` and of the product's, in the order of `ARMS`."""
        names = {*names, PRODUCT}
        return {arm: self.texts(arm) for name, arm in ARMS.items() if name in names}

    def texts(self, arm: Arm) -> Texts:
        """Make the texts of one arm of `ARMS`, for the recipe's own target."""
        if arm.name == PRODUCT:
            return self.product.texts
        if arm.source == "coreset":
            # The largest selection that any size can need: other sizes select nothing anew.
            per_class = self.recipe.texts_per_class
            selected = self.runs.run(coresets, **self.target_context.inputs("train"), per_class=per_class)
            return dict.fromkeys(self.seeds, selected)
        if arm.name == CALIBRATED:
            # The stage that labels by the calibrated model measures its offset, whatever texts it labels.
            recipe = few_texts(self._baseline(ARMS[SOFT_ZERO_SHOT]), TRIAL_TEXTS)
            runs = self._variant_runs(CALIBRATED, recipe)
            return Variant(runs, self.quiet, recipe, self.target_context, self.seeds[:1]).texts
        if arm.source in ("nothing", "train"):
            return None
        recipe = self._baseline(arm)
        return Variant(
            self._variant_runs(arm.name, recipe), self.quiet, recipe, self.target_context, self.seeds
        ).texts

    def _baseline(self, arm: Arm) -> Recipe:
        """The recipe of an arm whose texts the model writes."""
        if arm.name != "rerank":
            recipes = {"few-shot": few_shot, "zero-shot": zero_shot, SOFT_ZERO_SHOT: soft_zero_shot}
            return recipes[arm.name](self.recipe)
        costs = [self.product.passes_per_text]
        for draws in (1, 2):
            trial = few_texts(rerank(self.recipe, draws), TRIAL_TEXTS)
            generated = generated_texts(self.quiet, trial, self.target_context)
            costs.append(generated.figures["token_passes_per_text"])
        draws = equal_draws(*costs)
        logger.info("rerank chooses among %d texts, which cost as much as one of %s", draws, PRODUCT)
        return rerank(self.recipe, draws)

    def _variant_runs(self, name: str, recipe: Recipe, arm: str | None = None) -> StageRuns:
        """Runs the stages of a variant, with a name of its own in the UI, and the study's in the ledger.

        Args:
            arm: that it makes the texts of; default, `name`.
        """
        ui_name = "".join(letter if letter.isalnum() else "-" for letter in f"{recipe.name}-{name}".lower())
        runs = stage_runs(self.requested, recipe.model_copy(update={"name": ui_name}), self.root)
        runs.context = runs.context.model_copy(update={"recipe": self.recipe.name})
        self._parts.append(runs)
        self._variants[arm or name] = runs
        return runs

    @property
    def _making_seconds(self) -> dict[str, dict[str, float]]:
        """The time of each stage that made the first seed's texts, by arm and stage, where nothing was cached."""
        others = (self.name, coresets.name, mechanism_audit.name)
        seconds: dict[str, dict[str, float]] = {}
        for arm, runs in self._variants.items():
            for record in runs.records:
                if not record.cached and not record.partly_cached and record.stage not in others:
                    of_arm = seconds.setdefault(arm, {})
                    of_arm[record.stage] = of_arm.get(record.stage, 0.0) + record.seconds
        return seconds

    def trials(
        self, arms: Mapping[Arm, Texts], sizes: Sequence[int], context: TargetContext | None = None
    ) -> Plan:
        """Plan the fine-tunings of arms: for each arm and size, a trial per seed; for the model itself, one trial.

        Args:
            context: with the model that is fine-tuned and its data; default, the recipe's.
        """
        return [
            [
                self.trial(context or self.target_context, arm, None if texts is None else texts[seed], size, seed)
                for seed in (self.seeds if arm.source != "nothing" else self.seeds[:1])
            ]
            for arm, texts in arms.items()
            for size in arm.sizes(sizes, (context or self.target_context).data.train.rows)
        ]

    def trial(self, context: TargetContext, arm: Arm, texts: StageArtifact | None, size: int, seed: int) -> Trial:
        """Plan one fine-tuning on `size` texts, as evenly over the classes as possible, or on all train rows."""
        if arm.name == ALL_ROWS:
            counts = Counter(read_split(self.runs.context, context.data.train).labels)
        else:
            counts = class_counts(size, self.runs.context.labels)
        return Trial(context, arm, texts, counts, seed)

    def evaluate(self, plans: Sequence[Plan]) -> list[list[StageArtifact]]:
        """Fine-tune on all trials: for each plan, the evaluations of its trials.

        The first seed of each arm and size tries all learning rates and numbers of steps, and the others use its
        choice.
        """
        settings, execution = self.recipe.finetune_eval, self.recipe.execution
        plan = [*chain.from_iterable(plans)]
        searched = self.quiet.run_each(arm_eval, searching(plan, settings), execution)
        rounds = repeating(plan, settings, searched)
        repeated = iter(self.quiet.run_each(arm_eval, [*chain.from_iterable(rounds)], execution))
        evaluated = iter([[one, *islice(repeated, len(rest))] for one, rest in zip(searched, rounds, strict=True)])
        return [[*chain.from_iterable(islice(evaluated, len(part)))] for part in plans]

    def classify(self, arms: Mapping[Arm, Texts], sizes: Sequence[int]) -> list[StageArtifact]:
        """Train the TF-IDF classifier on every arm that has texts, at each size and with each seed."""
        settings = self.recipe.finetune_eval
        with_texts = {arm: texts for arm, texts in arms.items() if arm.source != "nothing"}
        inputs = [
            {
                "arm": trial.arm,
                "made": trial.made,
                "counts": dict(trial.counts),
                "labels": list(self.runs.context.labels),
                "train": trial.target_context.data.train,
                "validation": trial.target_context.data.validation,
                "test": trial.target_context.data.test,
                "max_validation_rows": settings.max_validation_rows,
                "max_test_rows": settings.max_test_rows,
                "seed": trial.seed,
                "held_out_seed": settings.seeds[0],
            }
            for trials in self.trials(with_texts, sizes)
            for trial in trials
        ]
        return self.quiet.run_each(tfidf_eval, inputs, self.recipe.execution)

    def measure(self, arms: Mapping[Arm, Texts], sizes: Sequence[int]) -> list[StageArtifact]:
        """Measure the texts of every arm that has any, except for those of all train rows, which are too many."""
        inputs = [
            {
                "arm": arm,
                "made": None if texts is None else [texts[seed] for seed in self.seeds],
                "sizes": arm.sizes(sizes),
                "seeds": list(self.seeds),
                **self.target_context.inputs("train", "test"),
            }
            for arm, texts in arms.items()
            if arm.source != "nothing" and arm.name != ALL_ROWS
        ]
        return self.quiet.run_each(arm_measures, inputs, self.recipe.execution)

    def finish(
        self,
        table: Task[..., StageArtifact],
        arms: Iterable[Arm],
        sizes: Sequence[int],
        private: Mapping[Arm, Variant] | None = None,
        /,
        **inputs: object,
    ) -> StudyRecord:
        """Run the stage with the study's table on `inputs`, and write the record with its page and pictures.

        Args:
            private: the variants of the product's arm with a guarantee.
        """
        self.runs.run(table, **inputs)
        recipe = self.recipe
        record = StudyRecord(
            run_id=f"{self._began:%Y%m%dT%H%M%SZ}-{recipe.name}-{self.name}",
            recipe=self.requested,
            plan=self.runs.plan,
            guarantee=self.product.guarantee,
            data=self.target_context.data.model_dump(mode="json"),
            model=self.target_context.model.model_dump(mode="json"),
            started=self._began,
            seconds=time.perf_counter() - self._clock,
            versions=library_versions(),
            stages=[record for runs in self._parts for record in runs.records],
            study=self.name,
            command=self._command,
            commit=source_commit(),
            machine=machine(),
            arms=tuple(arm.name for arm in arms),
            sizes=tuple(sizes),
            seeds=self.seeds,
            guarantees={arm.name: variant.guarantee for arm, variant in (private or {}).items()},
            making_seconds=self._making_seconds,
        )
        page = study_page(record)
        record = write_study(self.root, record, page, study_pictures(record))
        with never_failing(f"the study {self.name}"):
            key = artifact_key(recipe.name, self.name)
            create_markdown_artifact(page, key=key, description=f"The tables of the study {self.name}")
        return record


class _WithoutPages(UiArtifacts):
    def show_stage(self, records: Sequence[StageRecord]) -> None:
        pass
