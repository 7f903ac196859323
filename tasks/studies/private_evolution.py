"""Private Evolution: the records' noisy votes for texts, and variations of the texts that were kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradmm.config.settings import GenerationSettings, TargetGradientSettings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.releasing import ledger_of, proposed_budget, released_once
from gradmm.tasks.runtime.stage_task import (
    Outcome,
    Publication,
    RunContext,
    SplitReference,
    stage_key,
    stage_task,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

STAGE = "private_votes"


@stage_task(STAGE)
def private_votes(
    context: RunContext,
    train: SplitReference,
    texts: StageArtifact,
    space: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    matching: TargetGradientSettings,
    mechanism: GaussianMechanism,
    iterations: int,
    per_class: int,
    publication: Publication,
) -> StageArtifact:
    """Keep the texts with the most noisy votes. Each histogram is charged to the ledger before its noise is drawn.

    Args:
        mechanism: of the whole release of `iterations` histograms, with sensitivity 1.
    """
    from gradmm.rivals.private_evolution import voted_texts, votes_of_records
    from gradmm.rivals.releases import VOTES, mechanism_of_part, rival_release

    public = {
        "texts": texts,
        "space": space,
        "model": model,
        "prompt_template": prompt_template,
        "matching": matching,
        "mechanism": mechanism,
        "iterations": iterations,
        "per_class": per_class,
    }
    release = rival_release(
        context.recipe, mechanism, VOTES, iterations, publication.key, stage_key(STAGE, public)
    )

    def votes() -> tuple[pd.DataFrame, dict[int, np.ndarray]]:
        language_model, template = read_model(context, model, prompt_template)
        data, candidates = read_split(context, train), texts.read()
        counted = votes_of_records(language_model, template, candidates, data, space, matching, per_class)
        return candidates, counted

    def publish(private: tuple[pd.DataFrame, dict[int, np.ndarray]]) -> StageArtifact:
        each = mechanism_of_part(mechanism, iterations)
        return publication.publish(*voted_texts(*private, each, per_class))

    return released_once(context, mechanism, release, publication, votes, publish)


@stage_task("variations")
def variations(
    context: RunContext,
    kept: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    text_tokens: dict[int, int],
    generation: GenerationSettings,
    variations: int,
    seed: int,
    iteration: int,
) -> Outcome:
    """Let the model write variations of the kept texts, which stay beside them."""
    from gradmm.rivals.private_evolution import vary_texts

    language_model, template = read_model(context, model, prompt_template)
    seeds = seed, iteration
    return vary_texts(
        language_model, template, kept.read(), instructions, text_tokens, generation, variations, seeds
    )


def check_votes_budget(context: RunContext, mechanism: GaussianMechanism) -> None:
    """Refuse Private Evolution whose histograms together would exceed the budget, before the first is charged.

    Args:
        mechanism: of all histograms together, with sensitivity 1.

    Raises:
        BudgetExhausted: if they would.
    """
    from gradmm.rivals.releases import VOTES, rival_release

    if mechanism.safe:
        ledger_of(context).check(proposed_budget(context), rival_release(context.recipe, mechanism, VOTES))
