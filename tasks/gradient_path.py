"""Gradients of an arm's texts and of real ones along fine-tuning on the arm's, with one seed."""

from __future__ import annotations

from gradmm_core.arms import Arm, class_counts
from gradmm_core.artifacts import StageArtifact
from gradmm_core.finetune_eval import Examples
from gradmm_core.gradient_path import gradient_path as measured_path
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.template import tokenise_texts
from gradmm_core.wording import ResponseTemplate
from tasks.arm_texts import ArmTexts
from tasks.finetuning import finetuning_of, tokenised
from tasks.stage import Outcome, RunContext, SplitReference, stage_task


@stage_task("gradient_path")
def gradient_path(
    context: RunContext,
    arm: Arm,
    made: StageArtifact | None,
    size: int,
    train: SplitReference,
    real: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
    settings: FinetuneEvalSettings,
) -> Outcome:
    """Along one run of fine-tuning: the settings name one seed and one learning rate.

    Args:
        real: the rows that stand for the real data: the same for every arm and seed.
    """
    (seed,), (learning_rate,) = settings.seeds, settings.learning_rates
    trainer = finetuning_of(context, model, wording, settings)

    data = ArmTexts(context, arm, made, train).of(class_counts(size, context.labels), seed)
    tokens = tokenise_texts(trainer.tokenizer, data.texts, trainer.template.max_text_tokens, arm.name)
    own, rows = Examples(tokens, data.labels), tokenised(trainer, context, real)
    frame = measured_path(trainer, arm.name, own, rows, learning_rate, seed)
    figures = {"texts": len(own), "real_rows": len(rows), "learning_rate": learning_rate}
    return frame.assign(size=size, texts=len(own), real_rows=len(rows)), figures
