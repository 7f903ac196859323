"""Fit how much likelier words have to be, so that texts have the words that were released."""

from __future__ import annotations

from gradmm.config.settings import ClassSettings, GenerationSettings, TargetGradientSettings, WordTiltSettings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("word_tilt")
def word_tilt(
    context: RunContext,
    target: StageArtifact,
    space: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    matching: TargetGradientSettings,
    categories: list[ClassSettings],
    text_tokens: dict[int, int],
    settings: WordTiltSettings,
    generation: GenerationSettings,
    seed: int,
) -> Outcome:
    """Fit the tilt of every class.

    Args:
        target: with token rates; the flow runs this stage only then.
        text_tokens: length of the texts, by label.
        generation: how texts are written.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.generation.word_tilt import fit_word_tilts

    language_model, template = read_model(context, model, prompt_template)
    return fit_word_tilts(
        language_model, template, target, space, matching, categories, text_tokens, settings, generation, seed
    )
