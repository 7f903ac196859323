"""The stages by which each rival releases under a guarantee and writes its texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradmm.config.recipe import Recipe
from gradmm.flows.pipeline import TargetContext, filtered_texts, generated_texts
from gradmm.flows.runtime.stage_runs import StageRuns
from gradmm.generation.per_class import text_tokens
from gradmm.lm.prompt import with_examples
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.studies.arm_recipes import unfiltered, with_instructions
from gradmm.studies.arms import Adapters, Epsvec, FewShot, PrivateEvolution
from gradmm.tasks.studies.dp_adapters import adapted_texts, private_adapters
from gradmm.tasks.studies.epsvec import private_means, steered_texts
from gradmm.tasks.studies.few_shot import private_examples
from gradmm.tasks.studies.private_evolution import check_votes_budget, private_votes, variations


@dataclass(frozen=True)
class Rival:
    """A method that releases texts of its own.

    Attributes:
        runs: run its stages; their plan has its guarantee.
        recipe: of the texts that the model writes for it.
        context: the study's target, of which it takes the public parts.
        per_class: number of texts of each class that it is to make.
    """

    runs: StageRuns
    recipe: Recipe
    context: TargetContext
    per_class: int

    def texts(self, settings: PrivateEvolution | Epsvec | FewShot | Adapters) -> StageArtifact:
        """Make its texts, from one release."""
        match settings:
            case PrivateEvolution():
                return self._private_evolution(settings)
            case Epsvec():
                return self._epsvec(settings)
            case FewShot():
                return self._few_shot(settings)
            case Adapters():
                return self._adapters(settings)

    def _private_evolution(self, settings: PrivateEvolution) -> StageArtifact:
        runs = self.runs
        releases = self._releasing | {"iterations": settings.iterations, "per_class": self.per_class}
        texts = self._public_texts
        for iteration in range(settings.iterations):
            if iteration:
                varied = {"variations": settings.variations, "iteration": iteration}
                texts = runs.run(variations, kept=texts, **varied, **self._writing)
            elif runs.found(private_votes, texts=texts, **releases) is None:
                check_votes_budget(runs.context, self._mechanism)
            texts = runs.run(private_votes, texts=texts, **releases)
        return texts

    def _epsvec(self, settings: Epsvec) -> StageArtifact:
        texts = self._public_texts
        means = self.runs.run(private_means, texts=texts, **self._releasing)
        steering = {"means": means, "strength": settings.strength}
        return self.runs.run(steered_texts, texts=texts, **steering, **self._writing)

    def _few_shot(self, settings: FewShot) -> StageArtifact:
        released = self.runs.run(
            private_examples,
            **self._writing,
            train=self.context.data.train,
            mechanism=self._mechanism,
            examples=settings.examples,
            declared_records=self.recipe.privacy.declared_records,
        ).read()
        examples = released.groupby("label")["text"]
        instructions = {
            label: with_examples(instruction, examples.get_group(label))
            for label, instruction in self.recipe.instructions.items()
        }
        recipe = unfiltered(with_instructions(self.recipe, instructions))
        return filtered_texts(self.runs, recipe, self.context, generated_texts(self.runs, recipe, self.context))

    def _adapters(self, settings: Adapters) -> StageArtifact:
        texts = self._public_texts
        adapters = self.runs.run(
            private_adapters,
            **self.context.inputs("train"),
            **settings._asdict(),
            instructions=self.recipe.instructions,
            mechanism=self._mechanism,
            seed=self.recipe.seed,
        )
        adapted = {"adapters": adapters, "rank": settings.rank}
        return self.runs.run(adapted_texts, texts=texts, **adapted, **self._writing)

    @property
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

    @property
    def _writing(self) -> dict[str, Any]:
        """The inputs of the stages that write."""
        target, recipe = self.context.target, self.recipe
        return self.context.inputs() | {
            "instructions": recipe.instructions,
            "text_tokens": {c.label: text_tokens(recipe, c.label, target) for c in recipe.classes},
            "generation": recipe.generation,
            "seed": recipe.seed,
        }
