"""Make the target space from text that the model writes itself. Reads no private records."""

from __future__ import annotations

from gradmm.config.settings import TargetGradientSettings
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("target_space")
def target_space(
    context: RunContext,
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    settings: TargetGradientSettings,
    clipping_norm: float,
) -> Outcome:
    """Compute basis, centres and the probe's features; the figures are statistics of public text.

    Args:
        settings: with a number for `probe_dimensions`.
        clipping_norm: of the gradient part of a record's vector.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.target.target_space import space_of_public_text

    language_model, template = read_model(context, model, prompt_template)
    return space_of_public_text(language_model, template, instructions, settings, clipping_norm)
