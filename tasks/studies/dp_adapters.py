"""DP adapters: weights that DP-SGD trains on the records, and texts that the adapted model writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradmm.config.settings import GenerationSettings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.releasing import released_once
from gradmm.tasks.runtime.stage_task import (
    Outcome,
    Publication,
    RunContext,
    SplitReference,
    stage_key,
    stage_task,
)

if TYPE_CHECKING:
    from gradmm.data.splits import LabelledTexts
    from gradmm.lm.template import TokenisedTemplate
    from gradmm.rivals.dp_adapters import AdaptedModel, Shape

    Private = tuple[AdaptedModel, TokenisedTemplate, LabelledTexts, dict[Shape, int]]

STAGE = "private_adapters"


@stage_task(STAGE)
def private_adapters(
    context: RunContext,
    train: SplitReference,
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    rank: int,
    passes: int,
    steps_per_pass: int,
    learning_rate: float,
    mechanism: GaussianMechanism,
    seed: int,
    publication: Publication,
) -> StageArtifact:
    """Release adapters of the model. They are charged to the ledger before the first noise is drawn.

    Args:
        mechanism: of all steps together, with sensitivity 1.
        seed: draws the weights that are not trained.
    """
    from gradmm.rivals import dp_adapters
    from gradmm.rivals.releases import ADAPTERS, rival_release

    public = {
        "model": model,
        "prompt_template": prompt_template,
        "instructions": instructions,
        "rank": rank,
        "passes": passes,
        "steps_per_pass": steps_per_pass,
        "learning_rate": learning_rate,
        "mechanism": mechanism,
        "seed": seed,
    }
    settings_key = stage_key(STAGE, public)
    release = rival_release(context.recipe, mechanism, ADAPTERS, key=publication.key, settings_key=settings_key)

    def read() -> Private:
        language_model, template = read_model(context, model, prompt_template)
        adapted = dp_adapters.AdaptedModel.of(language_model, rank, seed)
        data = read_split(context, train)
        return adapted, template, data, dp_adapters.gradient_rows(adapted, template, data, instructions)

    def publish(private: Private) -> StageArtifact:
        steps = passes, steps_per_pass, learning_rate
        figures = dp_adapters.train_adapters(*private, instructions, *steps, mechanism)
        return publication.publish(private[0].table(), figures)

    return released_once(context, mechanism, release, publication, read, publish)


@stage_task("adapted_texts")
def adapted_texts(
    context: RunContext,
    texts: StageArtifact,
    adapters: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    text_tokens: dict[int, int],
    generation: GenerationSettings,
    rank: int,
    adapters_seed: int,
    seed: int,
) -> Outcome:
    """Write as many texts as the model's own, by the model with the released adapters.

    Args:
        adapters_seed: that of `private_adapters`.
    """
    from gradmm.rivals.dp_adapters import AdaptedModel
    from gradmm.rivals.texts import texts_like

    language_model, template = read_model(context, model, prompt_template)
    adapted = AdaptedModel.of(language_model, rank, adapters_seed)
    adapted.load(adapters.read())
    models = adapted.language_model, language_model
    return texts_like(texts.read(), *models, template, instructions, text_tokens, generation, seed)
