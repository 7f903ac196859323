"""Stage 0: where the target lives, from text that the model writes itself. Nothing private is read."""

from __future__ import annotations

from dataclasses import fields

from gradmm_core.model_reference import ModelReference
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.wording import ResponseTemplate
from tasks.inputs import read_model
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("target_space")
def target_space(
    context: RunContext,
    model: ModelReference,
    wording: ResponseTemplate,
    instructions: dict[int, str],
    settings: TargetGradientSettings,
    clipping_norm: float,
) -> Outcome:
    """The basis and the centres, a probe's features, and what public text lets one expect of a private target.

    Args:
        settings: with 'auto' settled.
        clipping_norm: of a record's gradient.
    """
    # Late, see tasks/stage.py.
    from gradmm_core.target_space import PublicStatistics, make_target_space, public_texts, to_table

    language_model, template = read_model(context, model, wording)
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
