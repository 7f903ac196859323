"""Stop a run that cannot be finished.

Everything that later stages would refuse is checked before a release is charged, if it can be known by then; what
the model shows, before anything is computed. The texts that a filter keeps are checked after each filter.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from prefect import task

from gradmm.config.recipe import Recipe
from gradmm.errors import InputError, together
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import DataReference, read_model
from gradmm.tasks.runtime.stage_task import RunContext
from gradmm.threads import bfloat16_slowdown

if TYPE_CHECKING:
    from gradmm.evaluation.memory_plan import MemoryPlan

logger = logging.getLogger("gradmm.flow")

#: How much slower than float32 bfloat16 may be before the log says so.
SLOW = 2


def check_model(
    context: RunContext, recipe: Recipe, model: ModelReference, prompt_template: PromptTemplate
) -> MemoryPlan:
    """Check that the model can be loaded, that all stages fit in memory, and that texts and exemplars have room.

    Logs a line if the model's dtype is slow on this processor.

    Returns:
        The memory that each stage takes.

    Raises:
        InputError: with all settings that a later stage would refuse.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.evaluation.memory_plan import memory_plan
    from gradmm.filters.label_filter import exemplar_context
    from gradmm.generation.endpoint import check_endpoint
    from gradmm.generation.generation import check_generation
    from gradmm.target.preflight import check_rounding

    language_model, template = read_model(context, model, prompt_template)
    tokens = recipe.generation.text_tokens
    longest = recipe.template.max_text_tokens if tokens == "auto" else tokens
    endpoint = recipe.generation.endpoint
    plan, *_ = together(
        partial(memory_plan, recipe, language_model, template),
        partial(check_rounding, recipe, template.longest_response),
        *(
            partial(check_generation, language_model, category.instruction, longest, recipe.generation)
            for category in recipe.classes
        ),
        *([partial(check_endpoint, endpoint)] if endpoint else []),
    )
    if recipe.label_filter.enabled:
        exemplar_context(language_model, prompt_template, template, recipe.label_filter, longest)
    on_cpu = language_model.device.type == "cpu"
    if on_cpu and model.dtype == "bfloat16" and (slowdown := bfloat16_slowdown()) > SLOW:
        logger.info(
            "model: bfloat16 is about %.0f times as slow as float32 on this processor; set model.dtype=float32, "
            "before a private release, as it is another model",
            slowdown,
        )
    return plan


@task(name="model_check", persist_result=False, result_serializer="json")
def model_check(
    context: RunContext, recipe: Recipe, model: ModelReference, prompt_template: PromptTemplate
) -> None:
    """Do as `check_model`."""
    check_model(context, recipe, model, prompt_template)


@task(name="other_model_check", persist_result=False, result_serializer="json")
def other_model_check(
    context: RunContext, name: str, model: ModelReference, prompt_template: PromptTemplate
) -> None:
    """Check that another model than the recipe's can be loaded, and that its texts fit it.

    Args:
        name: by which the user calls it.

    Raises:
        InputError: if not, naming it.
    """
    try:
        read_model(context, model, prompt_template)
    except InputError as error:
        raise InputError(error.what, f"{error.where}, with {name}", error.fix) from error


def check_records(data: DataReference) -> None:
    """Check that there are enough records to audit the texts with.

    Raises:
        InputError: if there are too few.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.audits.mia_audit import MIN_RECORDS

    members, non_members = data.train.rows, data.validation.rows
    if min(members, non_members) < MIN_RECORDS:
        raise InputError(
            f"{members} rows to train and {non_members} to validate are too few to audit the texts with",
            "data",
            f"add rows: the audits need {MIN_RECORDS} of each",
        )


def check_kept(texts: StageArtifact, charged: bool) -> StageArtifact:
    """Return a filter's result if it has kept texts of every label.

    Raises:
        InputError: if a label has no text left. The message says where the dropped texts are and, in a private
            run, that the release is kept.
    """
    dropped = [label for label, count in texts.figures["kept_by_label"].items() if count == 0]
    if dropped:
        kept = "; the release is kept, and a run with these changes is not charged again" if charged else ""
        raise InputError(
            f"no text of label {dropped[0]} is left after {texts.stage}; column `reason` says why",
            str(texts.path),
            f"generate more texts (generation.per_class), or relax {texts.stage}{kept}",
        )
    return texts
