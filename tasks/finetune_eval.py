"""Fine-tune on the synthetic texts and on equally many real ones, and compare the accuracies."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gradmm.config.settings import FinetuneEvalSettings
from gradmm.evaluation.arm import Arm
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.arm_texts import ArmTexts
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task

if TYPE_CHECKING:
    from gradmm.data.examples import Examples
    from gradmm.evaluation.finetune_eval import Finetuning

logger = logging.getLogger("gradmm.flow")


@stage_task("arm_eval")
def arm_eval(
    context: RunContext,
    arm: Arm,
    made: StageArtifact | None,
    counts: dict[int, int],
    train: SplitReference,
    validation: SplitReference,
    test: SplitReference,
    model: ModelReference,
    prompt_template: PromptTemplate,
    settings: FinetuneEvalSettings,
    held_out_seed: int,
) -> Outcome:
    """Fine-tune on one arm with one seed; return one row per schedule, checkpoint and split.

    Args:
        made: the source of the arm's texts, see `ArmTexts`; or of the offset of the calibrated model.
        counts: number of texts of each label.
        held_out_seed: draws the validation and test rows where their number is limited; the same for every arm
            and seed.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.data.examples import HeldOut
    from gradmm.evaluation.finetune_eval import chosen_schedule, evaluate_arm, evaluate_before

    (seed,) = settings.seeds
    trainer = finetuning_of(context, model, prompt_template, settings)
    held_out = HeldOut(tokenised(trainer, context, validation), tokenised(trainer, context, test))
    held_out = held_out.limited(settings, held_out_seed)
    if arm.source == "nothing":
        offset = None
        if made is not None:  # the calibrated model
            offset = [made.figures["answer_offset"][str(label)] for label in trainer.template.labels]
        frame, texts = evaluate_before(trainer, held_out, arm.name, offset), 0
    else:
        examples = ArmTexts(context, arm, made, train).examples(trainer, counts, seed)
        frame, texts = evaluate_arm(trainer, arm.name, examples, held_out), len(examples)
    size = sum(counts.values())
    if texts < size:
        logger.warning("%s has %d texts fewer than %d", arm.name, size - texts, size)
    return frame.assign(size=size, texts=texts), {**chosen_schedule(frame)._asdict(), "texts": texts}


@stage_task("finetune_eval")
def finetune_eval(context: RunContext, shards: list[StageArtifact]) -> Outcome:
    """Concatenate the rows of `arm_eval` for the arms `before`, `synthetic` and `real`."""
    import pandas as pd  # imported here: see tasks/runtime/stage_task.py

    from gradmm.evaluation.finetune_eval import COLUMNS, CONFUSION, summarise

    frame = pd.concat([shard.read() for shard in shards], ignore_index=True)
    used = {f"texts_{arm}": int(count) for arm, count in frame.groupby("arm", sort=False)["texts"].max().items()}
    frame = frame[[*COLUMNS, CONFUSION]]
    return frame, summarise(frame) | used


def finetuning_of(
    context: RunContext, model: ModelReference, prompt_template: PromptTemplate, settings: FinetuneEvalSettings
) -> Finetuning:
    """Prepare the fine-tuning of one model on the run's device."""
    from gradmm.evaluation.finetune_eval import Finetuning
    from gradmm.lm.loading import forget_large_model

    language_model, template = read_model(context, model, prompt_template)
    forget_large_model(language_model)
    return Finetuning(model, language_model.tokenizer, language_model.placement, template, settings)


def tokenised(finetuning: Finetuning, context: RunContext, split: SplitReference) -> Examples:
    """Read and tokenise a split of the real data."""
    return finetuning.tokenised(read_split(context, split))
