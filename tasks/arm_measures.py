"""How the texts of an arm of a comparison read, and how near they are to real ones. No fine-tuning."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from gradmm_core.arms import Arm, class_counts
from gradmm_core.artifacts import StageArtifact
from gradmm_core.classification import text_embeddings
from gradmm_core.data import LabelledTexts
from gradmm_core.distribution import at_equal_sizes, frechet_distance, nearest_distances, squared_mmd
from gradmm_core.finetune_eval import sample_class_rows
from gradmm_core.model_reference import ModelReference
from gradmm_core.perplexity import log_perplexities
from gradmm_core.template import tokenise_texts
from gradmm_core.variety import distinct_n, self_bleu
from gradmm_core.wording import ResponseTemplate
from tasks.arm_texts import ArmTexts
from tasks.inputs import read_model, read_split
from tasks.stage import Outcome, RunContext, SplitReference, stage_task

#: Texts per forward pass.
BATCH_SIZE = 64


@stage_task("arm_measures")
def arm_measures(
    context: RunContext,
    arm: Arm,
    made: list[StageArtifact] | None,
    sizes: list[int],
    seeds: list[int],
    train: SplitReference,
    test: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
) -> Outcome:
    """Figures of every size and seed.

    Distances are between the embeddings of the arm's texts and of as many random test rows of each class, which
    every seed draws anew. Test rows, because train rows would be next to nothing from themselves.

    Args:
        made: of each seed, what the arm's texts come from; see `ArmTexts`.
    """
    language_model, template = read_model(context, model, wording)
    real = read_split(context, test)
    own = {
        seed: ArmTexts(context, arm, each, train)
        for seed, each in zip(seeds, made or [None] * len(seeds), strict=True)
    }

    def tokens(texts: LabelledTexts) -> list[list[int]]:
        return tokenise_texts(language_model.tokenizer, texts.texts, template.max_text_tokens, arm.name)

    def embedded(texts: LabelledTexts) -> np.ndarray:
        return text_embeddings(language_model, template, tokens(texts), BATCH_SIZE).double().numpy()

    rows = []
    for size in sizes:
        for seed in seeds:
            texts = own[seed].of(class_counts(size, context.labels), seed)
            drawn = real.take(sample_class_rows(real.labels, Counter(texts.labels), seed))
            ours, theirs = embedded(texts), embedded(drawn)
            rows.append(
                {
                    "arm": arm.name,
                    "size": size,
                    "seed": seed,
                    "texts": len(texts),
                    "log_perplexity": pd.Series(log_perplexities(language_model, tokens(texts))).mean(),
                    "distinct_2": distinct_n(texts.texts, 2),
                    "self_bleu": self_bleu(texts.texts),
                    "frechet_distance": at_equal_sizes(frechet_distance, ours, theirs, [seed])[0],
                    "squared_mmd": at_equal_sizes(squared_mmd, ours, theirs, [seed])[0],
                    "nearest_distance": nearest_distances(ours, theirs).mean(),
                }
            )
    return pd.DataFrame(rows), {}
