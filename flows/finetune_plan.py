"""Plans of fine-tunings: the first trial of each list chooses learning rate and steps, the others use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradmm.config.settings import FinetuneEvalSettings
from gradmm.evaluation.arm import Arm
from gradmm.flows.pipeline import TargetContext
from gradmm.storage.artifacts import StageArtifact


@dataclass(frozen=True)
class Trial:
    """One fine-tuning, with one seed, on texts of one arm.

    Attributes:
        made: output of the stage that made or selected the arm's texts; None for random train rows.
        counts: number of texts of each label.
    """

    target_context: TargetContext
    arm: Arm
    made: StageArtifact | None
    counts: Mapping[int, int]
    seed: int

    def inputs(self, settings: FinetuneEvalSettings, **grid: object) -> dict[str, Any]:
        """Return the inputs of the stage `arm_eval`.

        Args:
            grid: `learning_rates` and `steps` other than those of the settings.
        """
        return {
            "arm": self.arm,
            "made": self.made,
            "counts": dict(self.counts),
            "train": self.target_context.data.train,
            "validation": self.target_context.data.validation,
            "test": self.target_context.data.test,
            "model": self.target_context.model,
            "prompt_template": self.target_context.prompt_template,
            "settings": settings.model_copy(update={"seeds": (self.seed,), **grid}),
            "held_out_seed": settings.seeds[0],
        }


#: For each arm and size, one trial per seed.
Plan = Sequence[Sequence[Trial]]


def searching(plan: Plan, settings: FinetuneEvalSettings) -> list[dict[str, Any]]:
    """Return the inputs of each list's first trial, which tries all learning rates and numbers of steps."""
    return [trials[0].inputs(settings) for trials in plan]


def repeating(
    plan: Plan, settings: FinetuneEvalSettings, searched: Sequence[StageArtifact]
) -> list[list[dict[str, Any]]]:
    """Return the inputs of each list's other trials, with the learning rate and steps that the first one chose.

    Args:
        searched: outputs of the first trials.
    """
    return [
        [
            trial.inputs(
                settings, learning_rates=(first.figures["learning_rate"],), steps=(first.figures["steps"],)
            )
            for trial in trials[1:]
        ]
        for trials, first in zip(plan, searched, strict=True)
    ]
