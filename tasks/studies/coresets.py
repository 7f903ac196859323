"""Coresets of the private train split, by herding and k-center. The rows never leave the root."""

from __future__ import annotations

import pandas as pd

from gradmm.evaluation.coresets import CORESETS, select_per_class
from gradmm.lm.classification import text_embeddings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import tokenise_readable
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task

#: Texts per forward pass.
BATCH_SIZE = 64


@stage_task("coresets")
def coresets(
    context: RunContext,
    train: SplitReference,
    model: ModelReference,
    prompt_template: PromptTemplate,
    per_class: int,
) -> Outcome:
    """Select row numbers by both methods on the same embeddings: one row each, in the order of selection."""
    language_model, template = read_model(context, model, prompt_template)
    data = read_split(context, train)
    tokens, readable = tokenise_readable(language_model.tokenizer, data.texts, template.max_text_tokens)
    embeddings = text_embeddings(language_model, template, list(tokens), BATCH_SIZE)
    labels = [data.labels[row] for row in readable]
    rows = [
        {"method": method, "label": label, "rank": rank, "row": int(readable[row])}
        for method, select in CORESETS.items()
        for label, chosen in select_per_class(select, embeddings, labels, per_class).items()
        for rank, row in enumerate(chosen, start=1)
    ]
    return pd.DataFrame(rows), {"embedded": len(readable)}
