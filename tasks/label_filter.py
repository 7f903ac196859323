"""Stage 3: drop the texts that the model and the probe take for another class."""

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
    target: StageArtifact | None,
    space: StageArtifact | None,
) -> Outcome:
    """Few-shot classification with the recipe's public exemplars, and the opinion of the released probe.

    Args:
        target, space: what a probe is made of; None for texts that are made without one.
    """
    # Late, see tasks/stage.py.
    from gradmm_core.label_filter import filter_labels
    from gradmm_core.target_space import features_from_table
    from tasks.matched_target import released_probe

    language_model, template = read_model(context, model, wording)
    probe = None
    if target and space:
        features = features_from_table(space.read_table(), language_model.device)
        probe = released_probe(target, features, template)
    judged = filter_labels(language_model, wording, template, texts.read(), settings, probe)
    return judged, filter_figures(judged, "label_filter")
