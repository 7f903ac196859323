"""Gradients of an arm's texts and of real ones along fine-tuning on the arm's, with one seed."""

from __future__ import annotations

from gradmm_core.arms import ARMS, Arm
from gradmm_core.artifacts import StageArtifact
from gradmm_core.data import LabelledTexts
from gradmm_core.finetune_eval import Examples
from gradmm_core.gradient_path import gradient_path as measured_path
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.template import tokenise_texts
from gradmm_core.wording import ResponseTemplate
from tasks.arm_texts import ArmTexts
from tasks.finetuning import finetuning_of
from tasks.stage import Outcome, RunContext, SplitReference, stage_task

#: Draws the real rows. No recipe's seed is below zero: with one of them, the rows of the arm `random` would be the
#: first of these.
REAL_SEED = -1


@stage_task("gradient_path")
def gradient_path(
    context: RunContext,
    arm: Arm,
    made: StageArtifact | None,
    size: int,
    real_rows: int,
    train: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
    settings: FinetuneEvalSettings,
) -> Outcome:
    """Along one run of fine-tuning: the settings name one seed and one learning rate.

    Args:
        real_rows: of the train split, as evenly over the classes as the arm's texts are: the same for every arm.
    """
    (seed,), (learning_rate,) = settings.seeds, settings.learning_rates
    trainer = finetuning_of(context, model, wording, settings)

    def examples(data: LabelledTexts, where: str) -> Examples:
        tokens = tokenise_texts(trainer.tokenizer, data.texts, trainer.template.max_text_tokens, where)
        return Examples(tokens, data.labels)

    own = examples(ArmTexts(context, arm, made, train).of(size, seed), arm.name)
    real = examples(ArmTexts(context, ARMS["random"], None, train).of(real_rows, REAL_SEED), train.split)
    frame = measured_path(trainer, arm.name, own, real, learning_rate, seed)
    return frame.assign(size=size, texts=len(own), real_rows=len(real)), {
        "texts": len(own),
        "real_rows": len(real),
    }
