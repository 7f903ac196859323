"""Fit how much likelier words have to be, so that texts have the words that were released."""

from __future__ import annotations

import pandas as pd

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
        text_tokens: length of the texts, by label.
        generation: how texts are written.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.generation.word_tilt import fit_word_tilt, word_tilt_table
    from gradmm.lm.token_passes import ComputeMeter
    from gradmm.target.matched_target import released_naive_bayes

    language_model, template = read_model(context, model, prompt_template)
    naive_bayes = released_naive_bayes(target, space, template, matching)
    assert naive_bayes is not None  # the flow runs this stage only with token rates
    with ComputeMeter(language_model) as meter:
        fitted = {
            category.label: fit_word_tilt(
                language_model,
                template,
                category.instruction,
                category.label,
                naive_bayes,
                text_tokens[category.label],
                settings,
                generation,
                seed,
            )
            for category in categories
        }
    tables = [word_tilt_table(language_model, label, tilt) for label, tilt in fitted.items()]
    before, after = zip(*(tilt.distances for tilt in fitted.values()), strict=True)
    of_classes = {"tilted_tokens": map(len, tables), "word_distance_before": before, "word_distance": after}
    figures = {name: dict(zip(map(str, fitted), values, strict=True)) for name, values in of_classes.items()}
    return pd.concat(tables, ignore_index=True), figures | {"token_passes": meter.token_passes}
