"""Make the target space from text that the model writes itself. Reads no private records."""

from __future__ import annotations

from gradmm.config.settings import TargetGradientSettings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Publication, RunContext, stage_task

STAGE = "target_space"


@stage_task(STAGE)
def target_space(
    context: RunContext,
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    settings: TargetGradientSettings,
    clipping_norm: float,
    publication: Publication,
) -> StageArtifact:
    """Compute basis, centres and the probe's features; the figures are statistics of public text.

    A space that was made before is taken even if Prefect does not remember it, or by another path: on another
    processor a new one would have other bits, and a private target in it would be another release.

    Args:
        settings: with a number for `probe_dimensions`.
        clipping_norm: of the gradient part of a record's vector.
    """
    made = publication.found_intact()
    if made is not None and STAGE not in context.force:
        return made
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.target.target_space import space_of_public_text

    language_model, template = read_model(context, model, prompt_template)
    return publication.publish(
        *space_of_public_text(language_model, template, instructions, settings, clipping_norm)
    )
