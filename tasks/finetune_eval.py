"""Stage 6: what the synthetic texts are worth for fine-tuning, beside as many real ones."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from gradmm_core.filters import kept_texts
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.wording import ResponseTemplate
from tasks.stage import Outcome, RunContext, SplitReference, stage_task


@stage_task("finetune_eval")
def finetune_eval(
    context: RunContext,
    texts: StageArtifact,
    train: SplitReference,
    validation: SplitReference,
    test: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
    settings: FinetuneEvalSettings,
) -> Outcome:
    """Accuracy before fine-tuning, on the synthetic texts, and on as many real ones."""
    # Late, see tasks/stage.py.
    from gradmm_core.finetune_eval import HeldOut, summarise
    from gradmm_core.finetune_eval import finetune_eval as evaluate
    from tasks.finetuning import finetuning_of, synthetic_examples, tokenised

    finetuning = finetuning_of(context, model, wording, settings)
    frame = evaluate(
        finetuning,
        synthetic_examples(kept_texts(texts.read())),
        tokenised(finetuning, context, train),
        HeldOut(tokenised(finetuning, context, validation), tokenised(finetuning, context, test)),
    )
    return frame, summarise(frame)
