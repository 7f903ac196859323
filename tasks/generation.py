"""Generate texts in shards that are cached one by one."""

from __future__ import annotations

from gradmm.config.settings import ClassSettings, GenerationSettings, TargetGradientSettings
from gradmm.generation.shards import Shard
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


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
    from gradmm.generation.generation import generate_shard

    attention = None if matching is None or matching.matching == "head" else "eager"
    language_model, template = read_model(context, model, prompt_template, attention)
    return generate_shard(
        language_model,
        template,
        category,
        shard,
        text_tokens,
        settings,
        seed,
        target,
        space,
        records,
        clipping_norm,
        matching,
        word_tilt and word_tilt.read(),
    )


@stage_task("generation")
def generation(context: RunContext, shards: list[StageArtifact]) -> Outcome:
    """Concatenate the texts of all shards."""
    from gradmm.generation.generation import merge_shards

    return merge_shards([shard.read() for shard in shards], [shard.figures for shard in shards])
