"""Stage 2: synthetic texts whose gradients match the target, in shards that a crash does not lose."""

from __future__ import annotations

import pandas as pd

from gradmm_core.artifacts import StageArtifact
from gradmm_core.generation import Shard, generate, generation_figures
from gradmm_core.language_model import ModelReference
from gradmm_core.settings import ClassSettings, GenerationSettings, TargetGradientSettings
from gradmm_core.template import ResponseTemplate
from tasks.inputs import read_model
from tasks.matched_target import matched_target
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("generation_shard")
def generation_shard(
    context: RunContext,
    target: StageArtifact,
    space: StageArtifact | None,
    model: ModelReference,
    wording: ResponseTemplate,
    category: ClassSettings,
    shard: Shard,
    text_tokens: int,
    records: float | None,
    matching: TargetGradientSettings,
    settings: GenerationSettings,
    seed: int,
) -> Outcome:
    """Some of one class's texts."""
    attention = None if matching.matching == "head" else "eager"
    language_model, template = read_model(context, model, wording, attention)
    matched, where = matched_target(
        target, space, template, matching, category.label, records, language_model.device
    )
    texts = generate(
        language_model,
        template,
        matched,
        where,
        category.instruction,
        category.name,
        shard,
        text_tokens,
        matching,
        settings,
        seed,
    )
    return texts, generation_figures(texts)


@stage_task("generation")
def generation(context: RunContext, shards: list[StageArtifact]) -> Outcome:
    """All shards' texts together."""
    texts = pd.concat([shard.read() for shard in shards], ignore_index=True)
    return texts, generation_figures(texts)
