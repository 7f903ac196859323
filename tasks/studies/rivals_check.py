"""Whether the recipe's model suits the rivals: checked before the first release of a study."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prefect import task

from gradmm.errors import together
from gradmm.lm.model_reference import ModelReference
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.studies.arms import RIVALS, Adapters, Epsvec, FewShot
from gradmm.tasks.runtime.inputs import read_model
from gradmm.tasks.runtime.stage_task import RunContext


@task(name="rivals_check", persist_result=False, result_serializer="json")
def rivals_check(
    context: RunContext,
    names: tuple[str, ...],
    model: ModelReference,
    prompt_template: PromptTemplate,
    instructions: dict[int, str],
    text_tokens: int,
) -> None:
    """Check that a model suits rivals, by public quantities alone.

    Raises:
        InputError: with all that a rival would refuse later, when others have released.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.rivals import dp_adapters, few_shot
    from gradmm.rivals.epsvec import middle_layer

    language_model, template = read_model(context, model, prompt_template)
    lengths = dict.fromkeys(instructions, text_tokens)
    checks: list[Callable[[], object]] = []
    for name in names:
        match RIVALS[name]:
            case Epsvec():
                checks.append(partial(middle_layer, language_model))
            case FewShot(examples):
                room = template, instructions, lengths, examples
                checks.append(partial(few_shot.check_room, language_model, *room))
            case Adapters():
                checks.append(partial(dp_adapters.check_room, language_model, template, instructions))
            case _:
                pass
    together(*checks)
