"""Generate texts in shards that are cached one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from gradmm.config.settings import ClassSettings, GenerationSettings, TargetGradientSettings
from gradmm.generation.shards import Shard
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task

if TYPE_CHECKING:
    from torch import Tensor

    from gradmm.lm.template import TokenisedTemplate

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
) -> Outcome:
    """Generate one shard of a class's texts.

    Args:
        target, space, matching: of the release; left out for method=written without a tilt, whose texts another
            release leaves unchanged.
        records, clipping_norm: of the target to match; left out for method=written.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.generation.generation import generate, generation_figures, write
    from gradmm.target.matched_target import matched_target, released_probe

    if settings.method == "written":
        language_model, template = read_model(context, model, prompt_template)
        tilt = None
        if target is not None and matching is not None:
            tilt = _tilt(target, space, template, matching, category.label, settings)
        texts = write(
            language_model, template, category.instruction, category.name, shard, text_tokens, settings, seed, tilt
        )
        return texts, generation_figures(texts) | {TARGET_SHRINKAGE: {str(category.label): None}}
    assert target is not None
    assert matching is not None
    assert clipping_norm is not None
    attention = None if matching.matching == "head" else "eager"
    language_model, template = read_model(context, model, prompt_template, attention)
    label = category.label
    tilt = _tilt(target, space, template, matching, label, settings)
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


def _tilt(
    target: StageArtifact,
    space: StageArtifact | None,
    template: TokenisedTemplate,
    matching: TargetGradientSettings,
    label: int,
    settings: GenerationSettings,
) -> Tensor | None:
    """Return what is added to the logits of a class's words; None without token rates."""
    from gradmm.target.matched_target import released_naive_bayes

    naive_bayes = released_naive_bayes(target, space, template, matching) if settings.tilt else None
    return naive_bayes and settings.tilt * naive_bayes.log_ratios(template.labels.index(label))


@stage_task("generation")
def generation(context: RunContext, shards: list[StageArtifact]) -> Outcome:
    """Concatenate the texts of all shards."""
    from gradmm.generation.generation import generation_figures

    texts = pd.concat([shard.read() for shard in shards], ignore_index=True)
    shrinkage = {label: value for shard in shards for label, value in shard.figures[TARGET_SHRINKAGE].items()}
    return texts, generation_figures(texts) | {TARGET_SHRINKAGE: shrinkage}
