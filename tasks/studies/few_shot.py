"""DP few-shot: examples that the records release together, for the model to write texts after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradmm.config.settings import GenerationSettings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model, read_split
from gradmm.tasks.runtime.releasing import released_once
from gradmm.tasks.runtime.stage_task import Publication, RunContext, SplitReference, stage_key, stage_task

if TYPE_CHECKING:
    from gradmm.data.splits import LabelledTexts
    from gradmm.lm.language_model import LanguageModel
    from gradmm.lm.template import TokenisedTemplate
    from gradmm.rivals.few_shot import Shape

    Private = tuple[LanguageModel, TokenisedTemplate, LabelledTexts, dict[Shape, int]]

STAGE = "private_examples"

#: Share of the memory beside the model's weights for the keys and values of one class.
CACHE_SHARE = 0.8


@stage_task(STAGE)
def private_examples(
    context: RunContext,
    train: SplitReference,
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    text_tokens: dict[int, int],
    generation: GenerationSettings,
    examples: int,
    mechanism: GaussianMechanism,
    declared_records: int,
    seed: int,
    publication: Publication,
) -> StageArtifact:
    """Release examples of each class. They are charged to the ledger before the first noise is drawn.

    Args:
        examples: of each class.
        mechanism: of all sums together, with sensitivity 1.
    """
    from gradmm.rivals import few_shot
    from gradmm.rivals.releases import NEXT_TOKENS, rival_release

    public = {
        "model": model,
        "prompt_template": prompt_template,
        "instructions": instructions,
        "text_tokens": text_tokens,
        "generation": generation,
        "examples": examples,
        "mechanism": mechanism,
        "declared_records": declared_records,
        "seed": seed,
    }
    settings_key = stage_key(STAGE, public)
    release = rival_release(context.recipe, mechanism, NEXT_TOKENS, key=publication.key, settings_key=settings_key)

    writing = instructions, text_tokens, generation

    def read() -> Private:
        language_model, template = read_model(context, model, prompt_template)
        data, cache_bytes = read_split(context, train), _cache_bytes(language_model)
        rows = few_shot.prompt_rows(language_model, template, data, *writing, cache_bytes, declared_records)
        return language_model, template, data, rows

    def publish(private: Private) -> StageArtifact:
        to_write = *private, *writing, _cache_bytes(private[0])
        rows, figures = few_shot.private_examples(*to_write, examples, mechanism, declared_records, seed)
        return publication.publish(rows, figures)

    return released_once(context, mechanism, release, publication, read, publish)


def _cache_bytes(language_model: LanguageModel) -> int:
    from gradmm.evaluation.memory_plan import machine_bytes

    # Total memory, because free memory could depend on the records.
    return int(CACHE_SHARE * (machine_bytes(language_model.device) - language_model.bytes_on_device))
