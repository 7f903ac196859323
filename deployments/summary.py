"""The table at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradmm_core.artifacts import Root
from gradmm_core.errors import InputError, printable
from gradmm_core.ledger import Ledger, release_of
from gradmm_core.preflight import released_target
from gradmm_core.privacy import GaussianMechanism, gaussian_mechanism
from gradmm_core.recipe import Recipe
from gradmm_core.run_record import RunRecord, StageRecord

if TYPE_CHECKING:
    from gradmm_core.mechanism_audit import MechanismAudit  # it imports scikit-learn


def print_summary(record: RunRecord, root: Root) -> None:
    """What each stage did, what the texts are worth, what is guaranteed, and where it all is."""
    console = Console(markup=False)
    table = Table(title=f"{record.recipe.name}: {record.run_id}", title_justify="left")
    for heading in ("stage", "rows", "result", "time", "memory", ""):
        table.add_column(heading, justify="right" if heading in ("rows", "time", "memory") else "left")
    for stage in record.stages:
        time = "" if stage.cached else f"{stage.seconds:.1f} s"
        cached = "cached" if stage.cached else ""
        table.add_row(stage.stage, str(stage.rows), _result(stage), time, stage.memory, cached)
    table.add_section()
    table.add_row("total", "", "", f"{record.seconds:.1f} s", "", "")
    console.print(table)
    console.print(record.guarantee.sentence, highlight=False)
    folder = root.runs / record.run_id
    console.print(f"release: {folder / 'release'}", highlight=False, soft_wrap=True)
    console.print(f"report:  {folder / 'report.html'}", highlight=False, soft_wrap=True)


def print_privacy(recipe: Recipe, ledger: Ledger) -> None:
    """All releases from a recipe's data, and what the next one may cost."""
    console = Console(markup=False)
    entries, name = ledger.entries(), printable(recipe.ledger)
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
            entry.sha256[:12] if entry.sha256 else "begun, not finished",
        )
    if entries:
        console.print(table)
    else:
        console.print(f"no private release from {name} yet", highlight=False, soft_wrap=True)
    console.print(f"ledger: {ledger.file}", highlight=False, soft_wrap=True)
    mechanism = gaussian_mechanism(recipe.privacy)
    if mechanism is None:
        console.print("the recipe has no privacy.epsilon: its runs are not private, and are not counted")
        return
    budget = recipe.privacy.budget_epsilon or mechanism.epsilon
    spent = ledger.spent(mechanism.delta, mechanism.adjacency)
    console.print(
        f"spent: epsilon {spent:.4g} of {budget:g} at delta {mechanism.delta:.3g} ({mechanism.adjacency}), "
        f"composed over {len(entries)} release{'' if len(entries) == 1 else 's'}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"the next one: {_next_release(recipe, ledger, mechanism, budget)}", highlight=False, soft_wrap=True
    )


def print_audit(audit: MechanismAudit, mechanism: GaussianMechanism) -> None:
    """What each test certified, next to what it can see at all."""
    console = Console(markup=False)
    tests = (audit.repeated_draws, audit.one_run)
    table = Table(
        title=f"audit of epsilon {mechanism.epsilon:g}, delta {mechanism.delta:.3g}", title_justify="left"
    )
    for heading in ("", *(test.test for test in tests)):
        table.add_column(heading)
    rows = {
        "releases": [f"{2 * audit.repeated_draws.draws} (half with a canary)", "1"],
        "canaries": [str(test.canaries) for test in tests],
        "right guesses": ["", f"{audit.one_run.correct} of {audit.one_run.guesses}"],
        "epsilon is at least": [f"{test.certified_epsilon:.3f}" for test in tests],
        "expected of a correct one": [f"{test.expected_certified_epsilon:.3f}" for test in tests],
        "area under the ROC curve": [f"{test.auc:.3f}" for test in tests],
        "TPR at 1% FPR": [f"{test.tpr_at_1_fpr:.2%}" for test in tests],
        "TPR at 0.1% FPR": [f"{test.tpr_at_01_fpr:.2%}" for test in tests],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    console.print(table)
    console.print(
        f"{'passed' if audit.passes else 'FAILED: it leaks more than it claims'}, at a confidence of "
        f"{audit.one_run.confidence:g} for each test",
        highlight=False,
    )


def _next_release(recipe: Recipe, ledger: Ledger, mechanism: GaussianMechanism, budget: float) -> str:
    release = release_of(recipe.name, mechanism, released_target(recipe))
    try:
        ledger.check(release, budget, mechanism.delta)
    except InputError as refusal:
        return f"refused: {refusal}"
    noise = f"epsilon {mechanism.epsilon:g} with sigma {mechanism.sigma:.4g}"
    return f"{noise} ({release.space}) is within the budget"


def _result(stage: StageRecord) -> str:
    figures = stage.figures
    match stage.stage:
        case "target_space":
            coordinates = f"{figures['coordinates']} coordinates for each class"
            probe = figures["probe_dimensions"]
            return f"{coordinates}, a probe of {probe}" if probe else coordinates
        case "target_gradient":
            records = f"{sum(figures['records'].values())} records, {figures['clip_fraction']:.0%} clipped"
            if "probe_trust" in figures:
                records += f", a probe trusted {figures['probe_trust']:.0%}"
            if figures["sigma"] is None:
                return f"{records}, no noise"
            cosines = ", ".join(f"{cosine:.2f}" for cosine in figures["cosine"].values())
            return f"{records}, noise sigma {figures['sigma']:.3g}, cosine with the clean target {cosines}"
        case "generation":
            trusts = [f"{trust:.0%}" for trust in figures["target_trust"].values() if trust is not None]
            target = f"a target trusted {', '.join(trusts)}, " if trusts else ""
            return f"{target}{_texts(stage)}, {figures['token_passes_per_text']:,.0f} token passes per text"
        case "label_filter" | "loss_selection" | "category_balance":
            by_label = ", ".join(f"{label}: {n}" for label, n in figures["kept_by_label"].items())
            return f"{figures['kept']} left ({by_label}); {_texts(stage)}{_as_a_set(figures)}"
        case "finetune_eval":
            return (
                f"accuracy before {figures['accuracy_before']:.3f}, synthetic {_mean(figures, 'synthetic')}, "
                f"as many real {_mean(figures, 'real')}"
            )
        case "mechanism_audit":
            return (
                f"epsilon of at least {figures['certified_epsilon']:.2f} by {figures['draws']} draws (expected "
                f"{figures['expected_certified_epsilon']:.2f}, claimed {figures['claimed_epsilon']:g})"
            )
        case "memorisation":
            run = f"longest run of a member's words {figures['longest_run_any_member_max']}"
            return f"{figures['copies_of_any_member']} copies, {run}"
        case "mia_audit":
            seen = figures["detectable_advantage"]
            least = "too few records to see any" if seen is None else f"from {seen:.2f} on it would be seen"
            return f"advantage {figures['advantage']:.3f}, AUC {figures['auc']:.3f} ({least})"
    return ""


def _texts(stage: StageRecord) -> str:
    figures = stage.figures
    probe = f", the probe's {figures['mean_probe_loss']:.3f}" if "mean_probe_loss" in figures else ""
    perplexity = f"log-perplexity {figures['mean_log_perplexity']:.2f}"
    return f"matching loss {figures['mean_matching_loss']:.3f}{probe}, {perplexity}"


def _as_a_set(figures: dict) -> str:
    """Matching loss of the sum of the texts' gradients, where the stage has it."""
    if "set_matching_loss" not in figures:
        return ""
    return f", as a set {figures['set_matching_loss']:.3f} (before: {figures['set_matching_loss_before']:.3f})"


def _mean(figures: dict, arm: str) -> str:
    return f"{figures[f'accuracy_{arm}']:.3f} ± {figures[f'accuracy_{arm}_std']:.3f}"
