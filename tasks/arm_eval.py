"""What the texts of an arm are worth for fine-tuning, so many of each class and with one seed."""

from __future__ import annotations

import logging

from gradmm_core.arms import Arm
from gradmm_core.artifacts import StageArtifact
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.wording import ResponseTemplate
from tasks.stage import Outcome, RunContext, SplitReference, stage_task

logger = logging.getLogger("gradmm_core.flow")


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
    wording: ResponseTemplate,
    settings: FinetuneEvalSettings,
    held_out_seed: int,
) -> Outcome:
    """Accuracy at every checkpoint, with every learning rate in the settings; they name one seed.

    Args:
        counts: texts of each label.
        held_out_seed: draws validation and test rows, where they are limited: the same for every arm and seed.
    """
    # Late, see tasks/stage.py.
    from gradmm_core.finetune_eval import Examples, HeldOut, chosen_learning_rate, evaluate_arm, evaluate_before
    from gradmm_core.template import tokenise_texts
    from tasks.arm_texts import ArmTexts
    from tasks.finetuning import finetuning_of, tokenised

    (seed,) = settings.seeds
    trainer = finetuning_of(context, model, wording, settings)
    held_out = HeldOut(tokenised(trainer, context, validation), tokenised(trainer, context, test))
    held_out = held_out.limited(settings, held_out_seed)
    if arm.source == "nothing":
        frame, texts = evaluate_before(trainer, held_out), 0
    else:
        data = ArmTexts(context, arm, made, train).of(counts, seed)
        tokens = tokenise_texts(trainer.tokenizer, data.texts, trainer.template.max_text_tokens, arm.name)
        examples = Examples(tokens, data.labels)
        frame, texts = evaluate_arm(trainer, arm.name, examples, held_out), len(examples)
    asked = sum(counts.values())
    if texts < asked:
        logger.warning("%s has %d texts fewer than %d", arm.name, asked - texts, asked)
    return frame.assign(size=asked, texts=texts), {"learning_rate": chosen_learning_rate(frame), "texts": texts}
