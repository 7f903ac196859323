"""Drop texts that the model and the probe assign to another class."""

from __future__ import annotations

from gradmm.config.settings import LabelFilterSettings
from gradmm.filters.rows import filter_figures
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("label_filter")
def label_filter(
    context: RunContext,
    texts: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    settings: LabelFilterSettings,
    target: StageArtifact | None,
    space: StageArtifact | None,
) -> Outcome:
    """Classify the texts with the recipe's public exemplars and the released probe, if the filter is enabled.

    Args:
        target, space: the artifacts of the probe; None for texts that are generated without one.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.filters.label_filter import classify_texts, without_filter

    if not settings.enabled:
        kept = without_filter(texts.read())
        return kept, filter_figures(kept)
    language_model, template = read_model(context, model, prompt_template)
    return classify_texts(language_model, prompt_template, template, texts.read(), settings, target, space)
