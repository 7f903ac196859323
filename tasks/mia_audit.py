"""Stage 7: can the fine-tuned model tell the records behind the target gradient from others?"""

from __future__ import annotations

import numpy as np

from gradmm_core.artifacts import StageArtifact
from gradmm_core.filters import kept_texts
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import FinetuneEvalSettings, MiaAuditSettings
from gradmm_core.wording import ResponseTemplate
from tasks.stage import Outcome, RunContext, SplitReference, stage_task

#: Records of each kind that losses are computed for, as a multiple of what one run of the attack uses.
POOL = 10


@stage_task("mia_audit")
def mia_audit(
    context: RunContext,
    texts: StageArtifact,
    members: SplitReference,
    non_members: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
    learning_rate: float,
    finetuning: FinetuneEvalSettings,
    settings: MiaAuditSettings,
    epsilon: float | None,
    delta: float | None,
    seed: int,
) -> Outcome:
    """Fine-tunes on the synthetic texts once more and attacks the result.

    Members are the train rows. Non-members have to come from the same source, and in some data sets the test
    split does not: they are the validation rows.
    """
    # Late, see tasks/stage.py.
    from gradmm_core.classification import score
    from gradmm_core.mia_audit import mia_audit as audit
    from gradmm_core.mia_audit import summarise
    from tasks.finetuning import finetuning_of, synthetic_examples, tokenised

    trainer = finetuning_of(context, model, wording, finetuning)
    examples = synthetic_examples(kept_texts(texts.read()))
    tuned = trainer.finetune(examples, learning_rate, finetuning.seeds[0], "fine-tune for the audit")
    pool = POOL * (settings.threshold_records + settings.test_records)

    def losses(split: SplitReference) -> np.ndarray:
        records = tokenised(trainer, context, split).sample(pool, seed)
        scores = score(tuned, trainer.template, records.texts, records.labels, finetuning.eval_batch_size)
        return scores.losses.double().numpy()

    frame = audit(losses(members), losses(non_members), settings, seed, epsilon, delta or 0.0)
    return frame, summarise(frame)
