"""The private report of one run: a single HTML file that needs no network and no script."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup

from gradmm_core.artifacts import publish
from gradmm_core.location import Location
from gradmm_core.preflight import expected_cosines, released_target
from gradmm_core.privacy import gaussian_mechanism
from gradmm_core.recipe import Recipe
from gradmm_core.release import guarantee_table, how_texts_were_made, public_model_name
from gradmm_core.release_norms import ReleaseNorms
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
    path: Location,
    run: RunRecord,
    generated: pd.DataFrame,
    texts: pd.DataFrame,
    finetune: pd.DataFrame,
    audit: pd.DataFrame,
) -> None:
    """Writes the report, whole or not at all, readable by its owner only: it has figures of private data.

    Args:
        generated: the rows of the stage `generation`; their `loss_history` is enough.
        texts: the rows that the last filter kept.
        finetune: the rows of the stage `finetune_eval`.
        audit: the rows of the stage `mia_audit`.

    Raises:
        KeyError: for a figure that a stage has to give and did not.
    """
    from gradmm_core import plots  # late: matplotlib takes most of a second to import
    from gradmm_core.plot_style import svg

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradmm_core"),
        autoescape=True,  # the texts are untrusted; select_autoescape would not know the ending .html.jinja
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "points": points, "figure": figure, "duration": duration}
    names = run.recipe.class_names
    arms = accuracy_by_arm(run.stage("finetune_eval"), finetune)
    counts = Counter(texts["label"].tolist())
    left = survivors(run, names)
    figures = {
        "loss_history": plots.loss_history(generated),
        "survivors": plots.survivors(list(names.values()), [s.stage for s in left], [s.by_class for s in left]),
        "accuracy": plots.accuracy_by_step(finetune, run.stage("finetune_eval").figures),
        "roc": plots.roc(audit, run.stage("mia_audit").figures, **_claim(run)),
    }
    if cosines := noise_cosines(run.recipe, run.stages):
        figures["cosines"] = plots.cosines(*cosines)
    best, worst = best_and_worst(texts)
    html = environment.get_template("report.html.jinja").render(
        run=run,
        names=names,
        model=public_model_name(run),
        counts=[(name, counts[label]) for label, name in names.items()],
        guarantee_table=guarantee_table(run.recipe, run.guarantee),
        how_made=how_texts_were_made(run.recipe),
        stages=[(stage, key_figures(stage, names)) for stage in run.stages],
        parquet=[(stage, read_line(stage), link(path, stage)) for stage in run.stages],
        survivors=left,
        accuracy_before=run.stage("finetune_eval").figures["accuracy_before"],
        arms=arms,
        by_arm={arm.name: arm for arm in arms},
        plots={name: Markup(svg(each)) for name, each in figures.items()},  # svg escapes all texts
        audit={name: run.stage("mia_audit").figures[name] for name in AUDIT_FIGURES},
        audit_runs=audit.to_dict("records"),
        mechanism=next((s.figures for s in run.stages if s.stage == "mechanism_audit"), None),
        repeats=run.stage("memorisation").figures,
        best=best.to_dict("records"),
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


def link(report: Location, stage: StageRecord) -> str:
    """The address of a stage's Parquet from the report's own: it holds where the root is moved as a whole."""
    return quote(Path(os.path.relpath(str(stage.path), str(report.parent))).as_posix())


def best_and_worst(texts: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The texts that match best, and of the others those that match worst, the very worst first."""
    by_loss = texts.sort_values(["matching_loss", "id"])
    return by_loss.head(BEST_SHOWN), by_loss.iloc[BEST_SHOWN:].iloc[::-1].head(WORST_SHOWN)


def noise_cosines(
    recipe: Recipe, stages: Sequence[StageRecord]
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Of each class's noisy and clean target: the cosine that was expected (where it was) and the actual one.

    None in a run without noise.

    Args:
        stages: those of a run; all up to `target_gradient` at least.
    """
    mechanism = gaussian_mechanism(recipe.privacy)
    if mechanism is None:
        return None
    by_name = {stage.stage: stage for stage in stages}
    names = recipe.class_names
    cosines = by_name["target_gradient"].figures["cosine"]
    actual = {name: cosines[str(label)] for label, name in names.items()}
    space, records = by_name.get("target_space"), recipe.privacy.declared_records
    if space is None or records is None:
        return {}, actual
    centred = recipe.target_gradient.centred
    norms = ReleaseNorms.of(mechanism.clipping_norm, released_target(recipe).probe_share)
    expected = expected_cosines(mechanism, norms, space.figures, records)
    return {names[e.label]: e.centred if centred else e.plain for e in expected}, actual


def _claim(run: RunRecord) -> dict[str, float]:
    """Epsilon and delta of the guarantee, if it is one."""
    promise = run.guarantee
    if promise.epsilon is None or promise.delta is None or not promise.safe:
        return {}
    return {"epsilon": promise.epsilon, "delta": promise.delta}


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
