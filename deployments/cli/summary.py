"""Summaries on a terminal: of a run, of a privacy budget, of an audit."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from gradmm.config.recipe import BUILTIN, Recipe
from gradmm.deployments.cli.terminal import print_json, print_table
from gradmm.errors import BudgetExhausted, InputError, printable
from gradmm.outputs.descriptions import stage_result
from gradmm.outputs.formatting import duration
from gradmm.outputs.record import RunRecord
from gradmm.privacy.guarantee import rounded_up
from gradmm.privacy.ledger import Budget, Ledger, Release, budget_of, release_of
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.release_plan import ReleasePlan, release_plan
from gradmm.privacy.row_digests import NO_DIGESTS
from gradmm.storage.artifacts import Root

if TYPE_CHECKING:
    from gradmm.audits.mechanism_audit import MechanismAudit  # it imports scikit-learn


#: Names of the audit's checks, and the digits to show.
CHECKS = {
    "sensitivity": ("change of the sums by one unit, in C", 7),
    "noise": ("standard deviation, by the claimed one", 4),
    "correlation": ("largest correlation, in standard deviations", 2),
}


def print_summary(record: RunRecord, root: Root) -> None:
    """Print each stage's result, the guarantee, and the paths of the release folder and the report."""
    table = Table(title=f"{record.recipe.name}: {record.run_id}", title_justify="left")
    for heading in ("stage", "rows", "result", "time", "memory", ""):
        table.add_column(heading, justify="right" if heading in ("rows", "time", "memory") else "left")
    for stage in record.stages:
        time, cached = ("", "cached") if stage.cached else (duration(stage.seconds), "")
        result = printable(stage_result(stage, record.recipe))
        table.add_row(stage.stage, str(stage.rows), result, time, stage.memory, cached)
    table.add_section()
    table.add_row("total", "", "", duration(record.seconds), "", "")
    print_table(table)
    folder = root.runs / record.run_id
    print(record.guarantee.sentence)
    print(f"dataset: {folder / 'release'}")
    print(f"report:  {folder / 'report.html'}")


def check_data_are_there(recipe: Recipe) -> None:
    """Check that the recipe's local data, by which its ledger is named, are where its path leads from here.

    Raises:
        InputError: if they are not.
    """
    path = recipe.data.path
    if recipe.privacy.ledger or path is None or path.startswith(BUILTIN):
        return
    if not os.path.exists(os.path.expanduser(path)):
        fix = "run this in the folder that the path is relative to, or set privacy.ledger"
        raise InputError(f"nothing at {path!r}, so the ledger of these data is unknown", "data.path", fix)


def set_budget_of(recipe: Recipe, ledger: Ledger, epsilon: float) -> None:
    """Set the budget of all releases from a recipe's data, at the recipe's delta and adjacency.

    Raises:
        InputError: if epsilon is not positive, or the recipe has no delta.
    """
    delta = recipe.privacy.resolved_delta
    if delta is None:
        raise InputError("a budget needs a delta", "privacy.declared_records", "set it, or privacy.delta")
    if not 0 < epsilon < math.inf:
        raise InputError(f"{epsilon:g} is not a positive number", "--set-budget", "give a total epsilon")
    ledger.set_budget(Budget(epsilon=epsilon, delta=delta, adjacency=recipe.privacy.adjacency))


def next_release(
    recipe: Recipe, plan: ReleasePlan, ledger: Ledger, uncounted: np.ndarray = NO_DIGESTS
) -> tuple[Release, str | None]:
    """Return the release that a private recipe makes, and why the ledger would refuse it; None if it would not.

    Args:
        uncounted: `Ledger.digests` of the recipe's data, if they have been read.
    """
    assert plan.mechanism is not None
    planned = release_of(recipe.name, plan.mechanism, plan.target, recipe.privacy.unit_column)
    try:
        ledger.check(budget_of(recipe.privacy, plan.mechanism), planned, uncounted=uncounted)
    except BudgetExhausted as error:
        return planned, str(error)
    return planned, None


def print_privacy(recipe: Recipe, ledger: Ledger, as_json: bool = False) -> None:
    """Print the releases from a recipe's data, the budget they spent, and whether it covers one more."""
    entries, plan, name = ledger.all_entries(), release_plan(recipe), printable(recipe.ledger)
    mechanism, account = plan.mechanism, {"data": recipe.ledger, "ledger": str(ledger.file), "releases": entries}
    held = ledger.budget()
    budget = held or (mechanism and budget_of(recipe.privacy, mechanism))
    if budget is not None:
        spent = ledger.spent(budget.delta, budget.adjacency)
        account |= {"spent_epsilon": spent, "budget": budget}
    if mechanism is not None:
        planned, refusal = next_release(recipe, plan, ledger)
        account |= {"next_release": planned, "refusal": refusal}
    if as_json:
        print_json(account)
        return
    table = Table(title=f"releases from {name}", title_justify="left")
    for heading in ("time (UTC)", "recipe", "epsilon", "delta", "sigma", "C", "adjacency", "target", "artifact"):
        table.add_column(heading)
    for entry in entries:
        release = entry.release
        table.add_row(
            f"{entry.time:%Y-%m-%d %H:%M}",
            release.recipe,
            f"{release.epsilon:g}",
            f"{release.delta:.3g}",
            f"{release.sigma:.4g}",
            f"{release.clipping_norm:g}",
            release.adjacency,
            release.space,
            entry.sha256[:12] if entry.sha256 else "unfinished",
        )
    if entries:
        print_table(table)
    else:
        print(f"no private release from {name} yet")
    print(f"ledger: {ledger.file}")
    if budget is not None:
        print(
            f"spent: epsilon {rounded_up(spent, 4)} of {budget.epsilon:g} "
            f"at delta {budget.delta:.3g} ({budget.adjacency}), "
            f"composed over {len(entries)} release{'' if len(entries) == 1 else 's'}"
        )
        print(f"budget: {'set in the ledger' if held else 'proposed by the recipe; the first release sets it'}")
    if mechanism is None:
        print("the recipe has no privacy.epsilon: its runs are not private and spend no budget")
        return
    cost = f"epsilon {planned.epsilon:g} with sigma {planned.sigma:.4g} ({planned.space})"
    print(f"next release: {f'refused: {refusal}' if refusal else f'{cost} is within the budget'}")


def print_audit(audit: MechanismAudit, mechanism: GaussianMechanism) -> None:
    """Print the checks with their limits, and the epsilon that each attack certified beside the expected one."""
    checks = Table(
        title=f"audit of epsilon {mechanism.epsilon:g}, delta {mechanism.delta:.3g}", title_justify="left"
    )
    for heading in ("check", "of", "measured", "if correct", ""):
        checks.add_column(heading)
    for check in audit.checks:
        name, digits = CHECKS[check.test]
        limits = f"{check.low:.{digits}f} to {check.high:.{digits}f}"
        result = "passed" if check.passes else "FAILED"
        checks.add_row(name, check.part or "", f"{check.measured:.{digits}f}", limits, result)
    print_table(checks)
    tests = (audit.repeated_draws, audit.one_run)
    attacks = Table(title="attacks", title_justify="left")
    for heading in ("", *(test.test for test in tests)):
        attacks.add_column(heading)
    rows = {
        "releases": [str(test.releases) for test in tests],
        "canaries in each": [str(test.canaries) for test in tests],
        "correct guesses": ["", f"{audit.one_run.correct} of {audit.one_run.guesses}"],
        "lower bound on epsilon": [f"{test.certified_epsilon:.3f}" for test in tests],
        "expected if correct": [f"{test.expected_certified_epsilon:.3f}" for test in tests],
        "area under the ROC curve": [f"{test.auc:.3f}" for test in tests],
        "TPR at 1% FPR": [f"{test.tpr_at_1_fpr:.2%}" for test in tests],
        "TPR at 0.1% FPR": [f"{test.tpr_at_01_fpr:.2%}" for test in tests],
    }
    for name, values in rows.items():
        attacks.add_row(name, *values)
    print_table(attacks)
    verdict = "; ".join(["FAILED", *audit.failed]) if audit.failed else "passed"
    print(f"{verdict} (a correct mechanism fails once in {1 / audit.false_alarms:,.0f} times at most)")
