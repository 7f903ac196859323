"""The texts of an arm of a comparison, from the stage or split that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradmm_core.arms import Arm, first_texts
from gradmm_core.artifacts import StageArtifact
from gradmm_core.data import LabelledTexts
from gradmm_core.finetune_eval import sample_class_rows
from tasks.inputs import read_split
from tasks.stage import RunContext, SplitReference


@dataclass(frozen=True)
class ArmTexts:
    """Reads the texts of one arm.

    `made`: what the last filter left of the texts that the model wrote, or the rows selected as coresets; None for
    random rows of `train`.
    """

    context: RunContext
    arm: Arm
    made: StageArtifact | None
    train: SplitReference

    def of(self, counts: Mapping[int, int], seed: int) -> LabelledTexts:
        """The arm's first texts, so many of each label. Of random rows, the seed's own."""
        if self.arm.private_rows:
            return read_split(self.context, self.train).take(self._train_rows(counts, seed))
        assert self.made is not None
        texts = first_texts(self.made.read(), self.arm, counts)
        return LabelledTexts(tuple(texts["text"]), tuple(texts["label"].tolist()))

    def _train_rows(self, counts: Mapping[int, int], seed: int) -> list[int]:
        if self.made is None:
            return sample_class_rows(read_split(self.context, self.train).labels, counts, seed)
        selected = self.made.read()
        of_method = selected[selected["method"] == self.arm.name]
        return of_method.loc[of_method["rank"] <= of_method["label"].map(counts), "row"].tolist()
