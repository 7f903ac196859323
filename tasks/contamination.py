"""Compare train rows with test rows by the public model's own loss. For the private report only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradmm.lm.model_reference import ModelReference
from gradmm.tasks.runtime.inputs import read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task

if TYPE_CHECKING:
    from gradmm.lm.language_model import LanguageModel


@stage_task("contamination")
def contamination(
    context: RunContext, train: SplitReference, test: SplitReference, model: ModelReference, seed: int
) -> Outcome:
    """Test whether the model was trained on the train rows, and with which power.

    A copy of the model reads some rows only if its weights in float32 are small.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.audits.contamination import contamination as compare
    from gradmm.evaluation.trainable import trainable_model
    from gradmm.lm.loading import LARGE_MODEL, load_language_model

    language_model = load_language_model(model, context.device)

    def copy() -> LanguageModel:
        return trainable_model(model, language_model.tokenizer, language_model.placement, None, 0)

    of_train, of_test = (read_split(context, split).texts for split in (train, test))
    found = compare(
        language_model, of_train, of_test, None if language_model.weight_bytes > LARGE_MODEL else copy, seed
    )
    return found.to_table(), found.figures()
