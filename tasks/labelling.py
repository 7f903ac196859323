"""Give each text the class probabilities of the calibrated model and of what was released with the target."""

from __future__ import annotations

from gradmm.config.settings import LabellingSettings, TargetGradientSettings
from gradmm.filters.rows import kept_texts
from gradmm.labelling.labelling import labelled_texts, labelling_figures
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("labelling")
def labelling(
    context: RunContext,
    texts: StageArtifact,
    model: ModelReference,
    prompt_template: PromptTemplate,
    class_names: dict[int, str],
    instructions: dict[int, str],
    matching: TargetGradientSettings,
    settings: LabellingSettings,
    target: StageArtifact | None,
    space: StageArtifact | None,
) -> Outcome:
    """Label the texts that passed the filters. Public texts, written as for the target space, calibrate the model.

    Args:
        target, space: the artifacts of the release; None to label by the calibrated model alone.
    """
    from gradmm.labelling.teacher import label_texts  # imported here: see tasks/runtime/stage_task.py

    kept = kept_texts(texts.read())
    if settings.labels == "hard":
        labelled = labelled_texts(kept, None, class_names)
        return labelled, labelling_figures(labelled, class_names)
    language_model, template = read_model(context, model, prompt_template)
    return label_texts(
        language_model, template, kept, class_names, instructions, matching, settings, target, space
    )
