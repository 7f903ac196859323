"""The stages by which each rival releases under a guarantee, writes its texts and labels them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from prefect import Task

from gradmm.config.recipe import Recipe
from gradmm.flows.pipeline import TargetContext, filtered_texts, generated_texts, labelled_texts
from gradmm.flows.runtime.stage_runs import StageRuns
from gradmm.generation.per_class import text_tokens
from gradmm.lm.prompt import with_examples
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.studies.arm_recipes import unfiltered, with_instructions, without_release
from gradmm.studies.arms import Adapters, Epsvec, FewShot, PrivateEvolution
from gradmm.tasks.runtime.privacy_budget import check_charged
from gradmm.tasks.studies.class_shares import class_shares
from gradmm.tasks.studies.dp_adapters import adapted_texts, private_adapters
from gradmm.tasks.studies.epsvec import private_means, steered_texts
from gradmm.tasks.studies.few_shot import private_examples
from gradmm.tasks.studies.private_evolution import check_votes_budget, private_votes, variations


@dataclass(frozen=True)
class Rival:
    """A method that releases by itself, once. Every seed has its own texts, but where these are the release.

    Attributes:
        runs: run its stages; their plan has its guarantee. `quiet` runs those of all seeds but the first.
        recipe: of the texts that the model writes for it; its seed is the release's.
        context: the study's target, of which it takes the public parts.
        per_class: number of texts of each class that it is to make.
    """

    runs: StageRuns
    quiet: StageRuns
    recipe: Recipe
    context: TargetContext
    per_class: int
    settings: PrivateEvolution | Epsvec | FewShot | Adapters
    seeds: tuple[int, ...]

    def labelled(self, labels: Literal["hard", "soft"]) -> dict[int, StageArtifact]:
        """Label the texts, by seed: as they were written, or by the calibrated model and the released shares."""
        recipe = without_release(self.recipe, labels)
        labelled = {}
        for seed, texts in self.texts.items():
            runs = self._runs_of(seed)
            labelled[seed] = labelled_texts(runs, recipe, self.context, texts)
            if labels == "soft" and self._counts_records:
                shared = {"release": self.release, "class_names": recipe.class_names}
                labelled[seed] = runs.run(class_shares, texts=labelled[seed], **shared)
        return labelled

    @cached_property
    def texts(self) -> dict[int, StageArtifact]:
        """The texts by seed, with the classes that they were written for."""
        match self.settings:
            case PrivateEvolution():
                return dict.fromkeys(self.seeds, self.release)
            case Epsvec(strength):
                return self._written(steered_texts, means=self.release, strength=strength)
            case FewShot():
                return self._written_after_examples
            case Adapters(rank):
                adapted = {"adapters": self.release, "rank": rank, "adapters_seed": self.recipe.seed}
                return self._written(adapted_texts, **adapted)

    @cached_property
    def release(self) -> StageArtifact:
        """The release; of Private Evolution, which has one in each iteration, the last."""
        match self.settings:
            case PrivateEvolution():
                return self._kept_by_votes(self.settings)
            case Epsvec():
                return self._released(private_means, texts=self._public_texts, **self._releasing)
            case FewShot():
                return self._released(
                    private_examples,
                    **self._writing(self.recipe.seed),
                    train=self.context.data.train,
                    mechanism=self._mechanism,
                    examples=self.settings.examples,
                    declared_records=self.recipe.privacy.declared_records,
                )
            case Adapters():
                return self._released(
                    private_adapters,
                    **self.context.inputs("train"),
                    **self.settings._asdict(),
                    instructions=self.recipe.instructions,
                    mechanism=self._mechanism,
                    seed=self.recipe.seed,
                )

    def _released(self, stage: Task[..., StageArtifact], **inputs: Any) -> StageArtifact:
        """Release, or find a release again, which a ledger has to have charged."""
        made = self.runs.run(stage, **inputs)
        if self._mechanism.safe:
            check_charged(self.runs.context, made)
        return made

    @property
    def _counts_records(self) -> bool:
        return isinstance(self.settings, PrivateEvolution | Epsvec)

    def _kept_by_votes(self, settings: PrivateEvolution) -> StageArtifact:
        runs = self.runs
        releases = self._releasing | {"iterations": settings.iterations, "per_class": self.per_class}
        texts = self._public_texts
        for iteration in range(settings.iterations):
            if iteration:
                varied = {"variations": settings.variations, "iteration": iteration}
                texts = runs.run(variations, kept=texts, **varied, **self._writing(self.recipe.seed))
            elif runs.found(private_votes, texts=texts, **releases) is None:
                check_votes_budget(runs.context, self._mechanism)
            texts = self._released(private_votes, texts=texts, **releases)
        return texts

    @property
    def _written_after_examples(self) -> dict[int, StageArtifact]:
        """Texts that the model writes after the released examples, by seed."""
        examples = self.release.read().groupby("label")["text"]
        instructions = {
            label: with_examples(instruction, examples.get_group(label))
            for label, instruction in self.recipe.instructions.items()
        }
        recipe = unfiltered(with_instructions(self.recipe, instructions))
        texts = {}
        for seed in self.seeds:
            runs, seeded = self._runs_of(seed), recipe.model_copy(update={"seed": seed})
            texts[seed] = filtered_texts(runs, seeded, self.context, generated_texts(runs, seeded, self.context))
        return texts

    def _written(self, stage: Task[..., StageArtifact], **inputs: Any) -> dict[int, StageArtifact]:
        """Texts of a stage that writes as many of each class as the model's own, by seed."""
        inputs |= {"texts": self._public_texts}
        return {seed: self._runs_of(seed).run(stage, **inputs, **self._writing(seed)) for seed in self.seeds}

    def _runs_of(self, seed: int) -> StageRuns:
        return self.runs if seed == self.seeds[0] else self.quiet

    @cached_property
    def _public_texts(self) -> StageArtifact:
        """Texts of the model alone, which a rival begins with."""
        return generated_texts(self.runs, self.recipe, self.context)

    @property
    def _releasing(self) -> dict[str, Any]:
        """The inputs of the stages that release sums."""
        return self.context.inputs("train") | {
            "space": self.context.space,
            "matching": self.context.plan.target,
            "mechanism": self._mechanism,
        }

    @property
    def _mechanism(self) -> GaussianMechanism:
        """The mechanism of its guarantee, for vectors of at most length 1."""
        mechanism = self.runs.plan.mechanism
        assert mechanism is not None  # there is an epsilon
        return mechanism.model_copy(update={"clipping_norm": 1.0})

    def _writing(self, seed: int) -> dict[str, Any]:
        """The inputs of the stages that write."""
        target, recipe = self.context.target, self.recipe
        return self.context.inputs() | {
            "instructions": recipe.instructions,
            "text_tokens": {c.label: text_tokens(recipe, c.label, target) for c in recipe.classes},
            "generation": recipe.generation,
            "seed": seed,
        }
