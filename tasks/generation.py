"""Stage 2: synthetic texts whose gradients match the target, in shards that a crash does not lose."""

from __future__ import annotations

import pandas as pd

from gradmm_core.artifacts import StageArtifact
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import ClassSettings, GenerationSettings, TargetGradientSettings
from gradmm_core.shards import Shard
from gradmm_core.wording import ResponseTemplate
from tasks.inputs import read_model
from tasks.stage import Outcome, RunContext, stage_task

#: Figure of each class: what its target is trusted beside its public centre, see `MatchedTarget`.
TARGET_TRUST = "target_trust"


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
    clipping_norm: float,
    matching: TargetGradientSettings,
    settings: GenerationSettings,
    seed: int,
) -> Outcome:
    """Some of one class's texts."""
    # Late, see tasks/stage.py.
    from gradmm_core.generation import generate, generation_figures
    from tasks.matched_target import matched_target, released_probe

    attention = None if matching.matching == "head" else "eager"
    language_model, template = read_model(context, model, wording, attention)
    label = category.label
    matched, where, trust = matched_target(
        target, space, template, matching, label, records, clipping_norm, language_model.device
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
        released_probe(target, where.features, template),
    )
    return texts, generation_figures(texts) | {TARGET_TRUST: {str(label): trust}}


@stage_task("generation")
def generation(context: RunContext, shards: list[StageArtifact]) -> Outcome:
    """All shards' texts together."""
    from gradmm_core.generation import generation_figures

    texts = pd.concat([shard.read() for shard in shards], ignore_index=True)
    trust = {label: value for shard in shards for label, value in shard.figures[TARGET_TRUST].items()}
    return texts, generation_figures(texts) | {TARGET_TRUST: trust}
