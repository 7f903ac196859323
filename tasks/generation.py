"""Generate texts in shards that are cached one by one."""

from __future__ import annotations

import pandas as pd

from gradmm.config.settings import ClassSettings, GenerationSettings, TargetGradientSettings
from gradmm.generation.shards import Shard
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task

#: Name of the figure with each class's shrinkage, see `MatchedTarget`.
TARGET_SHRINKAGE = "target_trust"


@stage_task("generation_shard")
def generation_shard(
    context: RunContext,
    model: ModelReference,
    prompt_template: PromptTemplate,
    category: ClassSettings,
    shard: Shard,
    text_tokens: int,
    settings: GenerationSettings,
    seed: int,
    target: StageArtifact | None = None,
    space: StageArtifact | None = None,
    records: float | None = None,
    clipping_norm: float | None = None,
    matching: TargetGradientSettings | None = None,
    word_tilt: StageArtifact | None = None,
) -> Outcome:
    """Generate one shard of a class's texts.

    Args:
        target, space, matching, records, clipping_norm: of the target to match; left out for method=written, whose
            texts another release leaves unchanged unless it tilts their words.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.generation.generation import generate, generation_figures, write
    from gradmm.generation.word_tilt import tilt_of
    from gradmm.target.matched_target import matched_target, released_probe

    attention = None if matching is None or matching.matching == "head" else "eager"
    language_model, template = read_model(context, model, prompt_template, attention)
    label = category.label
    tilt = word_tilt and tilt_of(word_tilt.read(), label, len(language_model.embeddings))
    if settings.method == "written":
        texts = write(
            language_model, template, category.instruction, category.name, shard, text_tokens, settings, seed, tilt
        )
        return texts, generation_figures(texts) | {TARGET_SHRINKAGE: {str(label): None}}
    assert target is not None
    assert matching is not None
    assert clipping_norm is not None
    matched, where, shrinkage = matched_target(
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
        tilt,
    )
    return texts, generation_figures(texts) | {TARGET_SHRINKAGE: {str(label): shrinkage}}


@stage_task("generation")
def generation(context: RunContext, shards: list[StageArtifact]) -> Outcome:
    """Concatenate the texts of all shards."""
    from gradmm.generation.generation import generation_figures

    texts = pd.concat([shard.read() for shard in shards], ignore_index=True)
    shrinkage = {label: value for shard in shards for label, value in shard.figures[TARGET_SHRINKAGE].items()}
    return texts, generation_figures(texts) | {TARGET_SHRINKAGE: shrinkage}
