"""Make the target space from text that the model writes itself. Reads no private records."""

from __future__ import annotations

from dataclasses import fields

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
    from gradmm.target.target_space import PublicStatistics, make_target_space, public_texts, to_table

    language_model, template = read_model(context, model, prompt_template)
    texts = public_texts(language_model, template, instructions, settings)
    space, statistics = make_target_space(
        language_model, template, texts, settings, clipping_norm, settings.directions
    )
    rows = language_model.head.shape[0] if space.rows is None else len(space.rows)
    columns = language_model.head.shape[1] if space.basis is None else space.basis.shape[1]
    figures = {
        "coordinates": rows * columns,
        "probe_dimensions": None if space.features is None else len(space.features.map),
        **{
            field.name: {str(label): getattr(of_label, field.name) for label, of_label in statistics.items()}
            for field in fields(PublicStatistics)
        },
    }
    return to_table(space), figures
