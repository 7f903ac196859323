"""Fine-tunings to make, and the order in which they choose their learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.texts import Aim
from gradmm_core.arms import Arm
from gradmm_core.artifacts import StageArtifact
from gradmm_core.settings import FinetuneEvalSettings


@dataclass(frozen=True)
class Trial:
    """An arm's texts, so many of each class, as one seed fine-tunes on them.

    `made` is None where they are random rows.
    """

    aim: Aim
    arm: Arm
    made: StageArtifact | None
    counts: Mapping[int, int]
    seed: int

    def inputs(self, settings: FinetuneEvalSettings, learning_rates: tuple[float, ...]) -> dict[str, Any]:
        """Of the task `arm_eval`."""
        return {
            "arm": self.arm,
            "made": self.made,
            "counts": dict(self.counts),
            "train": self.aim.data.train,
            "validation": self.aim.data.validation,
            "test": self.aim.data.test,
            "model": self.aim.model,
            "wording": self.aim.wording,
            "settings": settings.model_copy(update={"seeds": (self.seed,), "learning_rates": learning_rates}),
            "held_out_seed": settings.seeds[0],
        }


#: Of each arm and size, a trial for every seed.
Plan = Sequence[Sequence[Trial]]


def searching(plan: Plan, settings: FinetuneEvalSettings) -> list[dict[str, Any]]:
    """The first trial of each list, which tries all learning rates."""
    return [trials[0].inputs(settings, settings.learning_rates) for trials in plan]


def repeating(
    plan: Plan, settings: FinetuneEvalSettings, searched: Sequence[StageArtifact]
) -> list[list[dict[str, Any]]]:
    """The others, list by list, with the learning rate that the first one chose."""
    return [
        [trial.inputs(settings, (first.figures["learning_rate"],)) for trial in trials[1:]]
        for trials, first in zip(plan, searched, strict=True)
    ]
