"""The inputs that fine-tuning stages share: tokenised examples and the trainer."""

from __future__ import annotations

import pandas as pd

from gradmm_core.filters import token_lists
from gradmm_core.finetune_eval import Examples, Finetuning
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.template import tokenise_split
from gradmm_core.wording import ResponseTemplate
from tasks.inputs import read_model, read_split
from tasks.stage import RunContext, SplitReference


def finetuning_of(
    context: RunContext, model: ModelReference, wording: ResponseTemplate, settings: FinetuneEvalSettings
) -> Finetuning:
    """The trainer of one model, on the run's device."""
    language_model, template = read_model(context, model, wording)
    return Finetuning(model, language_model.tokenizer, language_model.device, template, settings)


def tokenised(finetuning: Finetuning, context: RunContext, split: SplitReference) -> Examples:
    """A split of the real data."""
    data = read_split(context, split)
    tokens = tokenise_split(finetuning.tokenizer, data.texts, finetuning.template.max_text_tokens, split.split)
    return Examples(tokens, data.labels)


def synthetic_examples(texts: pd.DataFrame) -> Examples:
    """The texts that the filters left."""
    return Examples(token_lists(texts), texts["label"].tolist())
