"""Fluency and diversity of the texts of one arm, and their distance from real texts."""

from __future__ import annotations

import pandas as pd

from gradmm.data.examples import class_counts, sample_class_rows
from gradmm.evaluation.arm import Arm
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.studies.measures import TextReader, text_measures
from gradmm.tasks.runtime.arm_texts import ArmTexts
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task


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
    prompt_template: PromptTemplate,
) -> Outcome:
    """Measure the texts of every size and seed.

    Distances are between the embeddings of the arm's texts and of random test rows, which every seed draws anew:
    as many of each class as texts were asked for, or all if there are fewer. They are the same for all arms. Train
    rows would be at distance zero from themselves.

    Args:
        made: the source of the arm's texts for each seed; see `ArmTexts`.
    """
    reader = TextReader(*read_model(context, model, prompt_template))
    real = read_split(context, test)
    rows = []
    for size in sizes:
        for seed, source in zip(seeds, made or [None] * len(seeds), strict=True):
            counts = class_counts(size, prompt_template.labels)
            texts = ArmTexts(context, arm, source, train).of(counts, seed)
            drawn = real.take(sample_class_rows(real.labels, counts, seed))
            measures = text_measures(reader, texts.texts, drawn.texts, seed)
            rows.append({"arm": arm.name, "size": size, "seed": seed, "texts": len(texts)} | measures)
    return pd.DataFrame(rows), {}
