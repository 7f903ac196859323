"""The command `gradmm check`: all problems of a recipe, its data and its model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gradmm.config.recipe import Recipe
from gradmm.data.splits import LabelledTexts
from gradmm.deployments.cli.summary import next_release
from gradmm.errors import printable, together
from gradmm.flows.pipeline import stage_runs
from gradmm.labelling.release_warnings import release_warnings
from gradmm.lm.model_reference import ModelReference, resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.privacy.ledger import Ledger
from gradmm.privacy.release_plan import release_plan
from gradmm.storage.artifacts import Root
from gradmm.storage.location import Location
from gradmm.storage.redaction import redact_errors
from gradmm.tasks.runtime.input_checks import check_model, check_records
from gradmm.tasks.runtime.inputs import DataReference, demo_material, read_split, refer_to_data

if TYPE_CHECKING:
    from gradmm.evaluation.memory_plan import MemoryPlan


def check(requested: Recipe, root_path: Location) -> None:
    """Read a recipe's data and load its model, and print what a run would find.

    Raises:
        InputError: with all problems of the data and of the model.
    """
    root = Root(path=root_path.resolve())
    root.prepare()
    recipe = demo_material.fn(requested, root)
    context = stage_runs(requested, recipe, root).context

    def data() -> DataReference:
        found = redact_errors(lambda: refer_to_data(context), "check", root.errors)
        check_records(found)
        return found

    def model() -> tuple[ModelReference, MemoryPlan]:
        reference = resolve_model(recipe.model)
        return reference, check_model(context, recipe, reference, PromptTemplate.of(recipe))

    found, (reference, memory) = together(data, model)
    for split in (found.train, found.validation, found.test):
        counts = Counter(read_split(context, split).labels)
        of_classes = ", ".join(f"{printable(c.name)} {counts[c.label]:,}" for c in recipe.classes)
        print(f"{split.split:12} {split.rows:,} rows: {of_classes}")
    million = memory.parameters / 1e6
    print(f"{'model':12} {printable(reference.name)}, {million:,.1f} million parameters, {reference.dtype}")
    of_stages = ", ".join(f"{stage} {needed / 2**30:.1f}" for stage, needed in memory.stages.items())
    print(f"{'memory':12} {of_stages} GiB, of {memory.available / 2**30:.1f} available")
    train = read_split(context, found.train)
    print(f"{'guarantee':12} {_guarantee(recipe, Ledger.of(root.path, requested.ledger), train)}")
    for line in release_warnings(recipe, release_plan(recipe)):
        print(f"{'release':12} {line}")


def _guarantee(recipe: Recipe, ledger: Ledger, train: LabelledTexts) -> str:
    """Say what a run guarantees and whether the ledger allows it."""
    plan = release_plan(recipe)
    if plan.mechanism is None:
        return "none (privacy.epsilon is null): the texts may repeat the data"
    text = f"epsilon {plan.mechanism.epsilon:g}, delta {plan.mechanism.delta:.3g}"
    _, refusal = next_release(recipe, plan, ledger, ledger.digests(train.texts, train.unit_names))
    return f"{text}; a new release is refused ({refusal})" if refusal else f"{text}; the budget allows it"
