"""EPSVec: the noisy means of the records' hidden states, and texts that the model writes when steered by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradmm.config.settings import GenerationSettings, TargetGradientSettings
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
    from torch import Tensor

    from gradmm.rivals.epsvec import PublicMeans

STAGE = "private_means"


@stage_task(STAGE)
def private_means(
    context: RunContext,
    train: SplitReference,
    texts: StageArtifact,
    space: StageArtifact | None,
    model: ModelReference,
    prompt_template: PromptTemplate,
    matching: TargetGradientSettings,
    mechanism: GaussianMechanism,
    publication: Publication,
) -> StageArtifact:
    """Release each class's mean hidden state, less that of the model's own texts.

    The release is charged to the ledger before its noise is drawn.

    Args:
        texts: of the model, of all classes.
        mechanism: with sensitivity 1.
    """
    from gradmm.rivals.epsvec import class_sums, public_means, released_vectors
    from gradmm.rivals.releases import MEAN_STATES, rival_release

    public = {
        "texts": texts,
        "space": space,
        "model": model,
        "prompt_template": prompt_template,
        "matching": matching,
        "mechanism": mechanism,
    }
    settings_key = stage_key(STAGE, public)
    release = rival_release(context.recipe, mechanism, MEAN_STATES, key=publication.key, settings_key=settings_key)

    def sums() -> tuple[dict[int, Tensor], PublicMeans]:
        language_model, template = read_model(context, model, prompt_template)
        means, data = public_means(language_model, template, texts.read()), read_split(context, train)
        return class_sums(language_model, template, means.features, data, space, matching, mechanism), means

    def publish(private: tuple[dict[int, Tensor], PublicMeans]) -> StageArtifact:
        return publication.publish(*released_vectors(*private, mechanism))

    return released_once(context, mechanism, release, publication, sums, publish)


@stage_task("steered_texts")
def steered_texts(
    context: RunContext,
    texts: StageArtifact,
    means: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    text_tokens: dict[int, int],
    generation: GenerationSettings,
    strength: float,
    seed: int,
) -> Outcome:
    """Write as many texts as the model's own, steered by the released means."""
    from gradmm.rivals.epsvec import steered_texts as write

    language_model, template = read_model(context, model, prompt_template)
    own, released = texts.read(), means.read_table()
    return write(language_model, template, own, released, instructions, text_tokens, generation, strength, seed)
