"""Distances of the texts of several arms from real texts, with intervals."""

from __future__ import annotations

import pandas as pd

from gradmm.data.examples import class_counts, sample_class_rows
from gradmm.evaluation.arm import Arm
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.studies.compare import MEASURES
from gradmm.studies.measures import TextReader, distance_intervals
from gradmm.tasks.runtime.arm_texts import ArmTexts
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, SplitReference, stage_task


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
    prompt_template: PromptTemplate,
) -> Outcome:
    """Tabulate one row per arm: the means of `arm_measures`, and 95% of its distances between random halves.

    Args:
        made: the source of each arm's texts with this seed; see `ArmTexts`.
        measures: of each arm, at this size and others.
        seed: draws the test rows, and the random rows of an arm of real texts.
    """
    reader = TextReader(*read_model(context, model, prompt_template))
    counts, held_out = class_counts(size, prompt_template.labels), read_split(context, test)
    # As `arm_measures` draws them for the means.
    real = reader.embeddings(held_out.take(sample_class_rows(held_out.labels, counts, seed)).texts)
    rows = []
    for arm, source, measured in zip(arms, made, measures, strict=True):
        texts = ArmTexts(context, arm, source, train).of(counts, seed)
        means = measured.read().loc[lambda frame: frame["size"] == size, [*MEASURES]].mean()
        row = {"arm": arm.name, "texts": len(texts), "half": min(len(texts), len(real)) // 2} | means.to_dict()
        rows.append(row | distance_intervals(reader.embeddings(texts.texts), real))
    return pd.DataFrame(rows), {}
