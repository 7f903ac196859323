"""The table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gradmm_core.artifacts import Root
from gradmm_core.run_record import RunRecord, StageRecord


def print_summary(record: RunRecord, root: Root) -> None:
    """What each stage did, what the texts are worth, what is guaranteed, and where it all is."""
    console = Console()
    table = Table(title=f"{record.recipe.name}: {record.run_id}", title_justify="left")
    for heading in ("stage", "rows", "result", "time", ""):
        table.add_column(heading, justify="right" if heading in ("rows", "time") else "left")
    for stage in record.stages:
        time = "" if stage.cached else f"{stage.seconds:.1f} s"
        table.add_row(stage.stage, str(stage.rows), _result(stage), time, "cached" if stage.cached else "")
    table.add_section()
    table.add_row("total", "", "", f"{record.seconds:.1f} s", "")
    console.print(table)
    console.print(record.guarantee.sentence, highlight=False)
    folder = root.runs / record.run_id
    console.print(f"release: {folder / 'release'}", highlight=False, soft_wrap=True)
    console.print(f"report:  {folder / 'report.html'}", highlight=False, soft_wrap=True)


def _result(stage: StageRecord) -> str:
    figures = stage.figures
    match stage.stage:
        case "target_gradient":
            noise = "no noise" if figures["sigma"] is None else f"noise sigma {figures['sigma']:.3g}"
            return f"{sum(figures['records'].values())} records, {figures['clip_fraction']:.0%} clipped, {noise}"
        case "generation":
            return _texts(stage)
        case "label_filter" | "loss_selection" | "category_balance":
            by_label = ", ".join(f"{label}: {n}" for label, n in figures["kept_by_label"].items())
            return f"{figures['kept']} left ({by_label}); {_texts(stage)}"
        case "finetune_eval":
            return (
                f"accuracy before {figures['accuracy_before']:.3f}, synthetic {_mean(figures, 'synthetic')}, "
                f"as many real {_mean(figures, 'real')}"
            )
        case "mia_audit":
            seen = figures["detectable_advantage"]
            least = "too few records to see any" if seen is None else f"from {seen:.2f} on it would be seen"
            return f"advantage {figures['advantage']:.3f}, AUC {figures['auc']:.3f} ({least})"
    return ""


def _texts(stage: StageRecord) -> str:
    figures = stage.figures
    return (
        f"matching loss {figures['mean_matching_loss']:.3f}, log-perplexity {figures['mean_log_perplexity']:.2f}"
    )


def _mean(figures: dict, arm: str) -> str:
    return f"{figures[f'accuracy_{arm}']:.3f} ± {figures[f'accuracy_{arm}_std']:.3f}"
