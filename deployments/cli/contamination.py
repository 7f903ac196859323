"""`gradmm audit --contamination`: whether the public model has seen the train rows before."""

from __future__ import annotations

from rich.table import Table

from gradmm.audits.contamination import Comparison, Contamination, contamination
from gradmm.config.recipe import Recipe
from gradmm.deployments.cli.terminal import print_table
from gradmm.evaluation.trainable import trainable_model
from gradmm.flows.pipeline import stage_runs
from gradmm.lm.language_model import LARGE_MODEL, LanguageModel, load_language_model
from gradmm.lm.model_reference import resolve_model
from gradmm.storage.artifacts import Root
from gradmm.storage.location import Location
from gradmm.storage.redaction import redact_errors
from gradmm.tasks.runtime.inputs import demo_material, read_split, refer_to_data


def audit_contamination(requested: Recipe, root_path: Location) -> None:
    """Compare a recipe's train rows with its test rows by the model's own loss, and print what is found.

    Raises:
        InputError: for data or a model that cannot be read, and for too few rows.
    """
    root = Root(path=root_path.resolve())
    root.prepare()
    recipe = demo_material.fn(requested, root)
    context = stage_runs(requested, recipe, root).context
    reference = resolve_model(recipe.model)
    language_model = load_language_model(reference, recipe.model.device)

    def copy() -> LanguageModel:
        return trainable_model(reference, language_model.tokenizer, language_model.device, None, 0)

    def compared() -> Contamination:
        data = refer_to_data(context)
        train, test = (read_split(context, split).texts for split in (data.train, data.test))
        large = language_model.weight_bytes > LARGE_MODEL  # its copy in float32 may not fit
        return contamination(language_model, train, test, None if large else copy, recipe.seed)

    found = redact_errors(compared, "contamination", root.errors)
    _print(found, recipe, reference.name)


def _print(found: Contamination, recipe: Recipe, model: str) -> None:
    table = Table(title=f"train rows of {recipe.name} under {model}", title_justify="left")
    for heading in ("score", "rows", "AUC", "95% interval", "found from", "found"):
        table.add_column(heading)
    for title, comparisons in (("", found.comparisons), ("planted: ", found.planted)):
        for each in comparisons:
            table.add_row(*_cells(title, each))
    print_table(table)
    if found.found:
        print(
            "the model finds the train rows likelier than the test rows, each compared with itself: it may have "
            "read them, or the splits differ in another way"
        )
    else:
        print("no sign that the model has read the train rows and not the test rows")
    if found.planted:
        print("planted: a copy of the model that has read half of these train rows once, against the other half")
    print("the model may have read both splits, which no comparison of them shows; these figures are private")


def _cells(title: str, each: Comparison) -> tuple[str, ...]:
    return (
        f"{title}{each.score}",
        f"{each.read:,} and {each.withheld:,}",
        f"{each.auc:.3f}",
        f"{each.low:.3f} to {each.high:.3f}",
        f"{each.detectable_auc:.3f}",
        "yes" if each.found else "no",
    )
