"""How near the texts of several arms are to real ones, with intervals, in one table."""

from __future__ import annotations

from gradmm_core.arms import Arm, class_counts
from gradmm_core.artifacts import StageArtifact
from gradmm_core.model_reference import ModelReference
from gradmm_core.wording import ResponseTemplate
from tasks.arm_texts import ArmTexts
from tasks.inputs import read_model, read_split
from tasks.stage import Outcome, RunContext, SplitReference, stage_task

#: Texts per forward pass.
BATCH_SIZE = 64

#: Random halves, of which each distance has one.
HALVES = 200


@stage_task("distribution")
def distribution(
    context: RunContext,
    arms: list[Arm],
    made: list[StageArtifact | None],
    measures: list[StageArtifact],
    size: int,
    seed: int,
    train: SplitReference,
    test: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
) -> Outcome:
    """One row per arm: the means of `arm_measures`, and 95% of its distances for random halves.

    Args:
        made: what each arm's texts come from, with this seed.
        measures: of each arm, at this size and others.
        seed: draws the random rows of which there are halves.
    """
    # Late, see tasks/stage.py.
    import numpy as np
    import pandas as pd

    from gradmm_core.classification import text_embeddings
    from gradmm_core.compare import MEASURES
    from gradmm_core.data import LabelledTexts
    from gradmm_core.distribution import (
        frechet_distance,
        half_sample_interval,
        mean_nearest_distance,
        squared_mmd,
    )
    from gradmm_core.template import tokenise_texts

    language_model, template = read_model(context, model, wording)

    def embedded(texts: LabelledTexts) -> np.ndarray:
        tokens = tokenise_texts(language_model.tokenizer, texts.texts, template.max_text_tokens, "texts")
        return text_embeddings(language_model, template, tokens, BATCH_SIZE).double().numpy()

    real = embedded(read_split(context, test))
    distances = {
        "frechet_distance": frechet_distance,
        "squared_mmd": squared_mmd,
        "nearest_distance": mean_nearest_distance,
    }
    rows = []
    for arm, its, measured in zip(arms, made, measures, strict=True):
        texts = ArmTexts(context, arm, its, train).of(class_counts(size, context.labels), seed)
        own = embedded(texts)
        means = measured.read().loc[lambda frame: frame["size"] == size, [*MEASURES]].mean()
        row = {"arm": arm.name, "texts": len(texts), "half": min(len(own), len(real)) // 2} | means.to_dict()
        for name, distance in distances.items():
            row[f"{name}_low"], row[f"{name}_high"] = half_sample_interval(distance, own, real, range(HALVES))
        rows.append(row)
    return pd.DataFrame(rows), {}
