"""Rows of the private train split that stand for all of it: herding and k-center. They never leave the root."""

from __future__ import annotations

import pandas as pd

from gradmm_core.classification import text_embeddings
from gradmm_core.coresets import CORESETS, select_per_class
from gradmm_core.model_reference import ModelReference
from gradmm_core.template import tokenise_texts
from gradmm_core.wording import ResponseTemplate
from tasks.inputs import read_model, read_split
from tasks.stage import Outcome, RunContext, SplitReference, stage_task

#: Texts per forward pass.
BATCH_SIZE = 64


@stage_task("coresets")
def coresets(
    context: RunContext,
    train: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
    per_class: int,
) -> Outcome:
    """Row numbers, in the order of selection, by both methods; the texts are read once."""
    language_model, template = read_model(context, model, wording)
    data = read_split(context, train)
    tokens = tokenise_texts(language_model.tokenizer, data.texts, template.max_text_tokens, train.split)
    embeddings = text_embeddings(language_model, template, tokens, BATCH_SIZE)
    rows = [
        {"method": method, "label": label, "rank": rank, "row": row}
        for method, select in CORESETS.items()
        for label, chosen in select_per_class(select, embeddings, data.labels, per_class).items()
        for rank, row in enumerate(chosen, start=1)
    ]
    return pd.DataFrame(rows), {"embedded": len(tokens)}
