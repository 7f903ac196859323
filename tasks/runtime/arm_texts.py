"""Texts of one arm of a comparison, read from a stage's output or from the train split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradmm.data.splits import LabelledTexts
from gradmm.evaluation.arm import Arm, first_texts
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_split
from gradmm.tasks.runtime.stage_task import RunContext, SplitReference

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

    from gradmm.data.examples import Examples
    from gradmm.evaluation.finetune_eval import Finetuning


@dataclass(frozen=True)
class ArmTexts:
    """Reads the texts of one arm.

    Attributes:
        made: output of `labelling`, or of `coresets`; None for random rows of `train`.
    """

    context: RunContext
    arm: Arm
    made: StageArtifact | None
    train: SplitReference

    def of(self, counts: Mapping[int, int], seed: int) -> LabelledTexts:
        """Return the first `counts[label]` texts of each label. The seed selects random rows."""
        if self.arm.private_rows:
            return read_split(self.context, self.train).take(self._train_rows(counts, seed))
        assert self.made is not None
        texts = first_texts(self.made.read(), self.arm, counts)
        return LabelledTexts(tuple(texts["text"]), tuple(texts["label"].tolist()))

    def examples(self, finetuning: Finetuning, counts: Mapping[int, int], seed: int) -> Examples:
        """Return the texts of `of` as examples to train on: synthetic ones with their class probabilities."""
        # Imported here because they import torch.
        import torch

        from gradmm.data.examples import Examples
        from gradmm.lm.template import tokenise_texts

        texts = self.of(counts, seed)
        if self.arm.private_rows:
            return finetuning.tokenised(texts)
        max_tokens = finetuning.template.max_text_tokens
        tokens = tokenise_texts(finetuning.tokenizer, texts.texts, max_tokens, self.arm.name)
        probabilities = self.probabilities(counts)
        assert probabilities is not None  # of made texts
        return Examples(tokens, texts.labels, torch.from_numpy(probabilities))

    def probabilities(self, counts: Mapping[int, int]) -> Float[np.ndarray, "texts classes"] | None:
        """Return the class probabilities of the texts of `of`, or None for real rows, which have labels."""
        from gradmm.labelling.labelling import probability_matrix

        if self.arm.private_rows:
            return None
        assert self.made is not None
        return probability_matrix(first_texts(self.made.read(), self.arm, counts))

    def _train_rows(self, counts: Mapping[int, int], seed: int) -> list[int]:
        if self.made is None:
            from gradmm.data.examples import sample_class_rows  # imported here because it imports torch

            return sample_class_rows(read_split(self.context, self.train).labels, counts, seed)
        selected = self.made.read()
        of_method = selected[selected["method"] == self.arm.name]
        return of_method.loc[of_method["rank"] <= of_method["label"].map(counts), "row"].tolist()
