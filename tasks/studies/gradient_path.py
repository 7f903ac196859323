"""Gradients of an arm's texts and of real texts along fine-tuning on the arm, with one seed."""

from __future__ import annotations

from gradmm.config.settings import FinetuneEvalSettings
from gradmm.data.examples import class_counts
from gradmm.evaluation.arm import Arm
from gradmm.evaluation.schedule import Schedule
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.studies.gradient_path import gradient_path as measured_path
from gradmm.tasks.finetune_eval import finetuning_of, tokenised
from gradmm.tasks.runtime.arm_texts import ArmTexts
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task


@stage_task("gradient_path")
def gradient_path(
    context: RunContext,
    arm: Arm,
    made: StageArtifact | None,
    size: int,
    train: SplitReference,
    real: SplitReference,
    model: ModelReference,
    prompt_template: PromptTemplate,
    settings: FinetuneEvalSettings,
) -> Outcome:
    """Measure one run of fine-tuning: the settings have a single seed, learning rate and number of steps.

    Args:
        made: the source of the arm's texts; see `ArmTexts`.
        real: the sample of real rows, the same for every arm and seed.
    """
    (seed,), (learning_rate,), (steps,) = settings.seeds, settings.learning_rates, settings.steps
    schedule = Schedule(learning_rate, steps)
    trainer = finetuning_of(context, model, prompt_template, settings)
    counts = class_counts(size, prompt_template.labels)
    examples = ArmTexts(context, arm, made, train).examples(trainer, counts, seed)
    real_examples = tokenised(trainer, context, real)
    frame = measured_path(trainer, arm.name, examples, real_examples, schedule, seed)
    figures = {"texts": len(examples), "real_rows": len(real_examples), **schedule._asdict()}
    return frame.assign(size=size, texts=len(examples), real_rows=len(real_examples)), figures
