"""Attack a model fine-tuned on the synthetic texts by membership inference."""

from __future__ import annotations

import numpy as np

from gradmm.config.settings import FinetuneEvalSettings, MiaAuditSettings
from gradmm.evaluation.schedule import Schedule
from gradmm.filters.rows import token_lists
from gradmm.labelling.labelling import probability_matrix
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task

#: Members, and non-members, whose losses are computed, as a multiple of the number used by one run of the attack.
POOL = 10


@stage_task("mia_audit")
def mia_audit(
    context: RunContext,
    texts: StageArtifact,
    members: SplitReference,
    non_members: SplitReference,
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

    Members are train rows. Non-members are validation rows: they must come from the same source, and the test
    split of some data sets does not.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    import torch

    from gradmm.audits.mia_audit import mia_audit as audit
    from gradmm.audits.mia_audit import summarise
    from gradmm.data.examples import Examples
    from gradmm.lm.classification import score
    from gradmm.tasks.finetune_eval import finetuning_of, tokenised

    trainer = finetuning_of(context, model, prompt_template, finetuning)
    labelled = texts.read()
    probabilities = torch.from_numpy(probability_matrix(labelled))
    examples = Examples(token_lists(labelled), labelled["label"].tolist(), probabilities)
    schedule = Schedule(learning_rate, steps)
    tuned = trainer.finetune(examples, schedule, finetuning.seeds[0], "fine-tune for the audit")
    pool = POOL * (settings.threshold_records + settings.test_records)

    def losses(split: SplitReference) -> np.ndarray:
        records = tokenised(trainer, context, split).sample(pool, seed)
        scores = score(tuned, trainer.template, records.texts, records.labels, finetuning.eval_batch_size)
        return scores.losses.double().numpy()

    frame = audit(losses(members), losses(non_members), settings, seed, epsilon, delta or 0.0)
    return frame, summarise(frame)
