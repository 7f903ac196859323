"""The private report of one run: a single HTML file that needs no network and no script."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml

from gradmm_core.artifacts import publish
from gradmm_core.release import guarantee_table, how_texts_were_made, public_model_name
from gradmm_core.run_record import RunRecord, StageRecord

BEST_SHOWN, WORST_SHOWN = 10, 5

FILTERS = ("label_filter", "loss_selection", "category_balance")

#: These stages' figures have tables of their own.
EVALUATIONS = ("finetune_eval", "mia_audit", "mechanism_audit", "memorisation")

#: Figures whose names are not words.
FIGURE_NAMES = {"distinct_2": "distinct bigrams", "self_bleu": "self-BLEU"}

AUDIT_RATES = ("advantage", "auc", "tpr_at_1_fpr", "tpr_at_01_fpr")
AUDIT_FIGURES = (
    *AUDIT_RATES,
    *(f"{name}_std" for name in AUDIT_RATES),
    "power",
    "detectable_advantage",
    "test_records",
)


def write_report(
    path: Path, run: RunRecord, texts: pd.DataFrame, finetune: pd.DataFrame, audit: pd.DataFrame
) -> None:
    """Writes the report, whole or not at all, readable by its owner only: it has figures of private data.

    Args:
        texts: the rows that the last filter kept.
        finetune: the rows of the stage `finetune_eval`.
        audit: the rows of the stage `mia_audit`.

    Raises:
        KeyError: for a figure that a stage has to give and did not.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradmm_core"),
        autoescape=True,  # the texts are untrusted; select_autoescape would not know the ending .html.jinja
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "points": points, "figure": figure, "duration": duration}
    names = {c.label: c.name for c in run.recipe.classes}
    arms = accuracy_by_arm(run.stage("finetune_eval"), finetune)
    counts = Counter(texts["label"].tolist())
    by_loss = texts.sort_values(["matching_loss", "id"])
    worst = by_loss.iloc[BEST_SHOWN:].iloc[::-1].head(WORST_SHOWN)
    html = environment.get_template("report.html.jinja").render(
        run=run,
        names=names,
        model=public_model_name(run),
        counts=[(name, counts[label]) for label, name in names.items()],
        guarantee_table=guarantee_table(run.recipe, run.guarantee),
        how_made=how_texts_were_made(run.recipe.generation),
        stages=[(stage, key_figures(stage, names)) for stage in run.stages],
        parquet=[(stage, read_line(stage)) for stage in run.stages],
        survivors=survivors(run, names),
        accuracy_before=run.stage("finetune_eval").figures["accuracy_before"],
        arms=arms,
        by_arm={arm.name: arm for arm in arms},
        plot=accuracy_plot(finetune, arms),
        audit={name: run.stage("mia_audit").figures[name] for name in AUDIT_FIGURES},
        audit_runs=audit.to_dict("records"),
        mechanism=next((s.figures for s in run.stages if s.stage == "mechanism_audit"), None),
        repeats=run.stage("memorisation").figures,
        best=by_loss.head(BEST_SHOWN).to_dict("records"),
        worst=worst.to_dict("records"),
        recipe_yaml=_yaml(run.recipe.model_dump(mode="json")),
        inputs_yaml=_yaml({"data": run.data, "model": run.model}),
    )
    publish(path, html.encode())


@dataclass(frozen=True)
class ArmAccuracy:
    """Test accuracies of one fine-tuning arm, mean and standard deviation over its seeds."""

    name: str
    learning_rate: float
    seeds: int
    honest: float
    honest_std: float
    best_on_test: float
    best_on_test_std: float


def accuracy_by_arm(stage: StageRecord, finetune: pd.DataFrame) -> list[ArmAccuracy]:
    """Every arm that was fine-tuned, in the order of the rows."""
    arms = []
    runs = dict.fromkeys(zip(finetune["arm"], finetune["learning_rate"], finetune["seed"], strict=True))
    for name in dict.fromkeys(arm for arm, _, _ in runs if arm != "before"):
        chosen = stage.figures[f"learning_rate_{name}"]
        arms.append(
            ArmAccuracy(
                name=name,
                learning_rate=chosen,
                seeds=len([1 for arm, learning_rate, _ in runs if (arm, learning_rate) == (name, chosen)]),
                honest=stage.figures[f"accuracy_{name}"],
                honest_std=stage.figures[f"accuracy_{name}_std"],
                best_on_test=stage.figures[f"accuracy_{name}_best_on_test"],
                best_on_test_std=stage.figures[f"accuracy_{name}_best_on_test_std"],
            )
        )
    return arms


@dataclass(frozen=True)
class Survivors:
    """What one stage left: how many texts in all and of each class, and the share of those generated."""

    stage: str
    kept: int
    by_class: list[int]
    share: float


def survivors(run: RunRecord, names: dict[int, str]) -> list[Survivors]:
    """The texts left after generation and after each filter."""
    generated = run.stage("generation").rows
    rows = [Survivors("generation", generated, [run.recipe.generation.per_class] * len(names), 1.0)]
    for stage in FILTERS:
        figures = run.stage(stage).figures
        by_class = [figures["kept_by_label"][str(label)] for label in names]
        rows.append(Survivors(stage, figures["kept"], by_class, figures["kept"] / generated))
    return rows


def key_figures(stage: StageRecord, names: dict[int, str]) -> list[tuple[str, str]]:
    """A stage's figures in words, as far as they have no table of their own."""
    if stage.stage in EVALUATIONS:
        return []
    return [
        (FIGURE_NAMES.get(name, name.replace("_", " ")), _in_words(value, names))
        for name, value in stage.figures.items()
    ]


def read_line(stage: StageRecord) -> str:
    """The line of Python that reads a stage's rows."""
    line = f"pd.read_parquet({str(stage.path)!r})"
    return f'{line}.query("kept")' if stage.stage in FILTERS else line


# ---------------------------------------------------------------------------------------------- accuracy plot


@dataclass(frozen=True)
class Line:
    """One arm's mean accuracy by step (`path`, an SVG path) and each seed's (`dots`)."""

    arm: str
    seeds: int
    path: str
    dots: list[tuple[float, float]]
    last: float


@dataclass(frozen=True)
class AccuracyPlot:
    """Test accuracy against fine-tuning steps, in the coordinates of a `width` x `height` SVG."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    before: float
    x_ticks: list[tuple[float, int]]
    y_ticks: list[tuple[float, float]]
    lines: list[Line]


def accuracy_plot(finetune: pd.DataFrame, arms: list[ArmAccuracy]) -> AccuracyPlot:
    """Lays out the test accuracies at each arm's chosen learning rate, and that before fine-tuning."""
    width, height, left, right, top, bottom = 480, 300, 62.0, 466.0, 12.0, 250.0
    test = _test_accuracies(finetune)
    before = test["before", 0.0][0][0]
    by_step = {arm.name: test[arm.name, arm.learning_rate] for arm in arms}
    drawn = [before, *(a for steps in by_step.values() for each in steps.values() for a in each)]
    ticks = _round_ticks(min(drawn), max(drawn))
    steps = sorted({0}.union(*by_step.values()))

    def x(step: int) -> float:
        return round(left + (right - left) * step / steps[-1], 1)

    def y(accuracy: float) -> float:
        return round(bottom - (bottom - top) * (accuracy - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    lines = []
    for arm in arms:
        means = {step: statistics.fmean(each) for step, each in by_step[arm.name].items()}
        corners = [f"{x(step)},{y(mean)}" for step, mean in means.items()]
        dots = [(x(step), y(accuracy)) for step, each in by_step[arm.name].items() for accuracy in each]
        lines.append(Line(arm.name, arm.seeds, "M" + " L".join(corners), dots, means[max(means)]))
    return AccuracyPlot(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        before=y(before),
        x_ticks=[(x(step), step) for step in steps[:: math.ceil(len(steps) / 6)]],
        y_ticks=[(y(tick), tick) for tick in ticks],
        lines=lines,
    )


def _test_accuracies(finetune: pd.DataFrame) -> dict[tuple[str, float], dict[int, list[float]]]:
    """The seeds' test accuracies, by arm and learning rate, then by step in rising order."""
    accuracies: dict[tuple[str, float], dict[int, list[float]]] = {}
    for row in finetune.sort_values(["step", "seed"]).to_dict("records"):
        if row["split"] == "test":
            by_step = accuracies.setdefault((row["arm"], row["learning_rate"]), {})
            by_step.setdefault(row["step"], []).append(row["accuracy"])
    return accuracies


def _round_ticks(low: float, high: float) -> list[float]:
    """At most seven round accuracies that enclose `low` and `high`."""
    step = next(s for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if high - low <= 5 * s)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [tick * step for tick in range(first, max(last, first + 1) + 1)]


# ------------------------------------------------------------------------------------------- numbers in words


def percent(value: float, std: float | None = None, digits: int = 1) -> str:
    """0.741, 0.012 -> '74.1 ± 1.2%'."""
    spread = "" if std is None else f" ± {100 * std:.{digits}f}"
    return f"{100 * value:.{digits}f}{spread}%"


def points(value: float, std: float | None = None) -> str:
    """A difference of two rates: 0.012, 0.041 -> '+1.2 ± 4.1 points'."""
    spread = "" if std is None else f" ± {100 * std:.1f}"
    return f"{100 * value:+.1f}{spread} points"


def figure(value: Any) -> str:
    """A number with four significant digits, or with all before the point; a count with all of them."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def duration(seconds: float) -> str:
    """0.32 -> '0.3 s', 200 -> '3 min 20 s', 7500 -> '2 h 05 min'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _in_words(value: Any, names: dict[int, str]) -> str:
    """A figure, or one for each label with the class's name in its place."""
    if not isinstance(value, dict):
        return figure(value)
    by_label = {str(label): name for label, name in names.items()}
    return ", ".join(f"{by_label.get(key, key)} {figure(each)}" for key, each in value.items())


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
