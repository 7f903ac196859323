"""Stage 3: drop the texts that the model takes for another class."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from gradmm_core.filters import filter_figures
from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import LabelFilterSettings
from gradmm_core.wording import ResponseTemplate
from tasks.inputs import read_model
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("label_filter")
def label_filter(
    context: RunContext,
    texts: StageArtifact,
    model: ModelReference,
    wording: ResponseTemplate,
    settings: LabelFilterSettings,
) -> Outcome:
    """Few-shot classification with the recipe's public exemplars."""
    # Late, see tasks/stage.py.
    from gradmm_core.label_filter import filter_labels

    language_model, template = read_model(context, model, wording)
    judged = filter_labels(language_model, wording, template, texts.read(), settings)
    return judged, filter_figures(judged, "label_filter")
