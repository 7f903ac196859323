"""Attack a model fine-tuned on the synthetic texts by membership inference."""

from __future__ import annotations

from gradmm.config.settings import FinetuneEvalSettings, MiaAuditSettings
from gradmm.evaluation.schedule import Schedule
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task


@stage_task("mia_audit")
def mia_audit(
    context: RunContext,
    texts: StageArtifact,
    members: SplitReference,
    non_members: SplitReference,
    rows_per_unit: int | None,
    model: ModelReference,
    prompt_template: PromptTemplate,
    learning_rate: float,
    steps: int,
    finetuning: FinetuneEvalSettings,
    settings: MiaAuditSettings,
    epsilon: float | None,
    delta: float | None,
    seed: int,
) -> Outcome:
    """Fine-tune on the synthetic texts once more, with the schedule chosen for them, and attack the model.

    Members are the train rows that the target was computed from, at most `rows_per_unit` of a unit. Non-members
    are validation rows: they must come from the same source, and the test split of some data sets does not.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.evaluation.membership import attack_texts
    from gradmm.tasks.finetune_eval import finetuning_of

    trainer = finetuning_of(context, model, prompt_template, finetuning)
    return attack_texts(
        trainer,
        texts.read(),
        trainer.tokenised(read_split(context, members).used(rows_per_unit)),
        trainer.tokenised(read_split(context, non_members)),
        Schedule(learning_rate, steps),
        settings,
        epsilon,
        delta,
        seed,
    )
