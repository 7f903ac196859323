"""Stop a run that cannot be finished.

Everything that later stages would refuse is checked before a release is charged, if it can be known by then. The
texts that a filter keeps cannot: they are checked after each filter.
"""

from __future__ import annotations

from prefect import task

from gradmm.config.recipe import Recipe
from gradmm.errors import InputError
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.inputs import DataReference, read_model
from gradmm.tasks.runtime.stage_task import RunContext


@task(name="later_stages", persist_result=False, result_serializer="json")
def check_later_stages(
    context: RunContext, recipe: Recipe, model: ModelReference, prompt_template: PromptTemplate
) -> None:
    """Check that the model has room and words for generation, and room for the label filter's exemplars.

    Raises:
        InputError: for a setting that one of these stages would refuse.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.filters.label_filter import exemplar_context
    from gradmm.generation.generation import check_generation

    language_model, template = read_model(context, model, prompt_template)
    tokens = recipe.generation.text_tokens
    assert isinstance(tokens, int)  # the recipe's validation refuses "auto" in a private run
    for category in recipe.classes:
        check_generation(language_model, category.instruction, tokens, recipe.generation)
    if recipe.label_filter.enabled:
        exemplar_context(language_model, prompt_template, template, recipe.label_filter, tokens)


def check_records(data: DataReference) -> None:
    """Check that there are enough records to audit the texts with.

    Raises:
        InputError: if there are too few.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.audit.mia_audit import MIN_RECORDS

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
