"""`gradmm audit --contamination`: whether the public model was trained on the train rows."""

from __future__ import annotations

from rich.table import Table

from gradmm.audits.contamination import Comparison, Contamination
from gradmm.config.recipe import Recipe
from gradmm.deployments.cli.terminal import print_table
from gradmm.deployments.serving.local_run import local_run, progress_on_stderr
from gradmm.storage.location import Location


def audit_contamination(recipe: Recipe, root: Location) -> None:
    """Compare a recipe's train rows with its test rows by the model's own loss, and print what is found.

    Raises:
        InputError: for data or a model that cannot be read, and for too few rows.
    """
    with local_run(root, verbose=False) as wait_for_server:
        from gradmm.flows.contamination import contamination

        wait_for_server()
        with progress_on_stderr(quiet=False):
            made = contamination(recipe, root=str(root))  # pyright: ignore[reportArgumentType]  (Prefect converts it)
            found = Contamination.from_table(made.read())
    _print(found, recipe)


def _print(found: Contamination, recipe: Recipe) -> None:
    table = Table(title=f"train rows of {recipe.name} under {recipe.model.name}", title_justify="left")
    for heading in ("score", "rows", "AUC", "95% interval", "found from", "found"):
        table.add_column(heading)
    for title, comparisons in (("", found.comparisons), ("planted: ", found.planted)):
        for each in comparisons:
            table.add_row(*_cells(title, each))
    print_table(table)
    print(found.verdict)
    if found.planted:
        print("planted: a copy of the model that has read half of these train rows once, against the other half")
    print("the model may have read both splits, which no comparison of them shows; these figures are private")


def _cells(title: str, each: Comparison) -> tuple[str, ...]:
    return (
        f"{title}{each.score}",
        f"{each.read:,} and {each.test:,}",
        f"{each.auc:.3f}",
        f"{each.low:.3f} to {each.high:.3f}",
        f"{each.detectable_auc:.3f}",
        "yes" if each.found else "no",
    )
