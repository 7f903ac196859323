"""EPSVec: the noisy means of the records' hidden states, and texts that the model writes when steered by them."""

from __future__ import annotations

from gradmm.config.settings import GenerationSettings, TargetGradientSettings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.releasing import already_released, charged_release, ledger_of, proposed_budget
from gradmm.tasks.runtime.stage_task import (
    Outcome,
    Publication,
    RunContext,
    SplitReference,
    stage_key,
    stage_task,
)

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
    from gradmm.rivals.epsvec import SPACE, class_sums, public_means, released_vectors
    from gradmm.rivals.releases import rival_release

    ledger = ledger_of(context)
    if mechanism.safe and (made := already_released(ledger, publication)):
        return made
    public = {
        "texts": texts,
        "space": space,
        "model": model,
        "prompt_template": prompt_template,
        "matching": matching,
        "mechanism": mechanism,
    }
    settings_key = stage_key(STAGE, public)
    release = rival_release(context.recipe, mechanism, SPACE, key=publication.key, settings_key=settings_key)
    if mechanism.safe:
        ledger.check(release, proposed_budget(context))  # fail early; charging checks again
    language_model, template = read_model(context, model, prompt_template)
    means = public_means(language_model, template, texts.read())
    data = read_split(context, train)
    sums = class_sums(language_model, template, means.features, data, space, matching)

    def publish() -> StageArtifact:
        return publication.publish(*released_vectors(sums, means, mechanism))

    if not mechanism.safe:
        return publish()
    return charged_release(context, ledger, release, publication, publish)


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
