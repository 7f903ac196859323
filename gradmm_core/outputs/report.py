"""The private report of one run: a single HTML file without scripts or external resources."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import numpy as np
import pandas as pd
import yaml
from jaxtyping import Float
from markupsafe import Markup

from gradmm.metrics.resemblance import Resemblance, Side
from gradmm.outputs.comparison import Comparison
from gradmm.outputs.descriptions import (
    accuracy_rows,
    stage_figures,
    stage_result,
    stage_sentence,
    stage_title,
    verdict,
)
from gradmm.outputs.formatting import duration, number, percent, points
from gradmm.outputs.glossary import meanings
from gradmm.outputs.grades import RULES, grades
from gradmm.outputs.record import FILTERS, RunRecord, StageRecord
from gradmm.outputs.release import epsilon_table, guarantee_table, how_texts_were_made, public_model_name
from gradmm.privacy.release_plan import ReleasePlan
from gradmm.storage.artifacts import publish
from gradmm.storage.location import Location
from gradmm.target.preflight import expected_cosines

BEST_SHOWN, WORST_SHOWN = 10, 5

#: Terms of figures that are not a stage's.
OTHER_TERMS = ("precision", "recall", "F1", "vocabulary", "words that the other side has too")

#: Stages whose figures have a section of their own.
EVALUATIONS = ("finetune_eval", "mia_audit", "mechanism_audit", "memorisation", "contamination")


class ReportRows(NamedTuple):
    """The rows that a report tabulates and draws.

    Attributes:
        generated: of the stage `generation`; only `loss_history` is used.
        texts: the labelled texts.
        finetune: of the stage `finetune_eval`.
        audit: of the stage `mia_audit`.
        compared: the texts and as many real ones.
    """

    generated: pd.DataFrame
    texts: pd.DataFrame
    finetune: pd.DataFrame
    audit: pd.DataFrame
    compared: Resemblance


def write_report(path: Location, run: RunRecord, rows: ReportRows, comparison: Comparison | None = None) -> None:
    """Write the report atomically, readable by its owner only: its figures are measured on private data.

    Args:
        comparison: with other ways of making training texts; None if none was made.

    Raises:
        KeyError: if a stage lacks a required figure.
    """
    names = run.recipe.class_names
    stages = {stage.stage: stage for stage in run.stages}
    evaluation = run.stage("finetune_eval").figures
    best, worst = best_and_worst(rows.texts)
    template = _environment().get_template("report.html.jinja")
    html = template.render(
        run=run,
        names=names,
        model=public_model_name(run),
        grades=grades(run),
        verdict=verdict(run),
        grade_rules=RULES,
        glossary=meanings(shown_terms(run)),
        costs=costs(run),
        guarantee_table=guarantee_table(run),
        epsilons=epsilon_table(run.guarantee),
        how_made=how_texts_were_made(run),
        purposes={name: stage_sentence(name) for name in stages},
        results={name: stage_result(stage, run.recipe) for name, stage in stages.items()},
        figures={name: stage_figures(stage, run.recipe) for name, stage in stages.items()},
        evaluations=EVALUATIONS,
        parquet=[(stage, read_line(stage), link(path, stage)) for stage in run.stages],
        survivors=survivors(run.stages, names),
        accuracies=accuracy_rows(evaluation, run.recipe),
        claimed=bool(_claim(run)),
        comparison=comparison,
        compared=rows.compared,
        resemblance=resemblance_rows(rows.compared),
        by_class=class_tables(rows.finetune, names),
        plots=_plots(run, rows),
        audit_runs=rows.audit.to_dict("records"),
        has_losses=has_losses(rows.texts),
        best=best.to_dict("records"),
        worst=worst.to_dict("records"),
        recipe_yaml=_yaml(run.recipe.model_dump(mode="json")),
        inputs_yaml=_yaml({"data": run.data, "model": run.model}),
    )
    publish(path, html.encode())


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradmm.outputs"),
        autoescape=True,  # select_autoescape does not recognise .html.jinja
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "points": points,
        "number": number,
        "duration": duration,
        "title": stage_title,
    }
    return environment


def _plots(run: RunRecord, rows: ReportRows) -> dict[str, Markup]:
    """Draw the pictures that the run has the figures for."""
    from gradmm.outputs import plots  # late: importing matplotlib takes most of a second
    from gradmm.outputs.plot_style import svg

    names = run.recipe.class_names
    left = survivors(run.stages, names)
    drawn = {
        "survivors": plots.survivors(list(names.values()), [s.stage for s in left], [s.by_class for s in left]),
        "accuracy": plots.accuracy_by_step(rows.finetune, run.stage("finetune_eval").figures),
        "lengths": plots.lengths(rows.compared),
        "map": plots.text_map(rows.compared),
        "roc": plots.roc(rows.audit, run.stage("mia_audit").figures, **_claim(run)),
    }
    if run.recipe.labelling.labels == "soft":
        drawn["confidence"] = plots.confidence(rows.texts, list(names.values()))
    if rows.generated["loss_history"].map(len).any():  # texts that are kept as written have no losses
        drawn["loss_history"] = plots.loss_history(rows.generated)
    if cosines := noise_cosines(run.plan, names, run.stages):
        drawn["cosines"] = plots.cosines(*cosines)
    if run.guarantee.in_words:
        drawn["trade_off"] = plots.trade_off(run.guarantee)
    return {name: Markup(svg(each)) for name, each in drawn.items()}  # svg escapes all texts


@dataclass(frozen=True)
class Survivors:
    """The texts left after one stage: total, per class, and the share of the generated texts."""

    stage: str
    kept: int
    by_class: list[int]
    share: float


def survivors(stages: Sequence[StageRecord], names: Mapping[int, str]) -> list[Survivors]:
    """Count the texts left after generation and after each filter in `stages`.

    Args:
        names: the classes' names, by label.
    """
    by_name = {stage.stage: stage for stage in stages}
    generated = by_name["generation"].rows  # as many for each class
    rows = [Survivors("generation", generated, [generated // len(names)] * len(names), 1.0)]
    for name in FILTERS:
        if name in by_name:
            figures = by_name[name].figures
            by_class = [figures["kept_by_label"][str(label)] for label in names]
            rows.append(Survivors(name, figures["kept"], by_class, figures["kept"] / generated))
    return rows


@dataclass(frozen=True)
class ClassTables:
    """The answers of one arm's fine-tuned model on the test split, class by class.

    Attributes:
        scores: name, test rows, precision, recall and F1 of each class, and at last the mean of all classes.
        confusion: name of the true class, and the rows by answered class, summed over the seeds.
        answers: names of the answered classes.
    """

    arm: str
    seeds: int
    scores: list[tuple[str, int, str, str, str]]
    confusion: list[tuple[str, list[int]]]
    answers: list[str]


def class_tables(finetune: pd.DataFrame, names: Mapping[int, str]) -> list[ClassTables]:
    """Tabulate the answers of each arm's chosen checkpoints; leave out an arm whose training has always diverged.

    Args:
        finetune: rows of the stage `finetune_eval`.
        names: the classes' names, by label.
    """
    from gradmm.evaluation.finetune_eval import class_scores, confusions_by_seed  # late: it imports torch

    tables = []
    in_order = [names[label] for label in sorted(names)]
    for arm, rows in finetune.groupby("arm", sort=False):
        counts = confusions_by_seed(rows)
        if not len(counts):
            continue
        columns = [[*each.T, each.mean(axis=1)] for each in class_scores(counts)]  # by class, then of their mean
        shown = [[_mean_and_std(each) for each in column] for column in columns]
        of_class = counts[0].sum(axis=1).tolist()
        scores = zip([*in_order, "mean of the classes"], [*of_class, sum(of_class)], *shown, strict=True)
        confusion = list(zip(in_order, counts.sum(axis=0).tolist(), strict=True))
        tables.append(ClassTables(str(arm), len(counts), list(scores), confusion, in_order))
    return tables


def resemblance_rows(compared: Resemblance) -> list[tuple[str, str, str]]:
    """Return name, synthetic and real value of each figure of `compared`."""

    def lengths(side: Side) -> str:
        if not len(side.lengths):
            return "none"
        low, median, high = (f"{each:g}" for each in np.quantile(side.lengths, [0.25, 0.5, 0.75]))
        return f"{median} ({low} to {high})"

    figures: dict[str, Callable[[Side], str]] = {
        "texts": lambda side: number(len(side.lengths)),
        "words per text, median and quartiles": lengths,
        "vocabulary": lambda side: number(side.vocabulary),
        "words that the other side has too": lambda side: percent(side.shared),
        "distinct bigrams": lambda side: number(side.distinct_2),
        "self-BLEU": lambda side: number(side.self_bleu),
    }
    return [(name, figure(compared.synthetic), figure(compared.real)) for name, figure in figures.items()]


def shown_terms(run: RunRecord) -> list[str]:
    """Return the terms of all figures in the report that may need a definition."""
    of_stages = [term for stage in run.stages for term, _ in stage_figures(stage, run.recipe)]
    return [*of_stages, *OTHER_TERMS]


def costs(run: RunRecord) -> list[tuple[str, str]]:
    """Return what the run took: time of the computed stages, longest stage, peak memory and token passes."""
    computed = [stage for stage in run.stages if not stage.cached]
    rows = [("whole run", duration(run.seconds))]
    rows.append(("stages computed", f"{len(computed)} of {len(run.stages)}"))
    if computed:
        longest = max(computed, key=lambda stage: stage.seconds)
        rows.append(("longest stage", f"{stage_title(longest.stage)}, {duration(longest.seconds)}"))
        if any(stage.peak_memory for stage in computed):
            rows.append(("peak memory", max(computed, key=lambda stage: stage.peak_memory or 0).memory))
    generation = run.stage("generation")
    passes = generation.rows * generation.figures["token_passes_per_text"]
    return [*rows, ("token passes of generation", number(float(passes)))]


def _mean_and_std(rates: Float[np.ndarray, " seeds"]) -> str:
    std = float(np.std(rates, ddof=1)) if len(rates) > 1 else None
    return percent(float(np.mean(rates)), std)


def read_line(stage: StageRecord) -> str:
    """Return the line of Python that reads a stage's rows."""
    line = f"pd.read_parquet({str(stage.path)!r})"
    return f'{line}.query("kept")' if stage.stage in FILTERS else line


def link(report: Location, stage: StageRecord) -> str:
    """Return the address of a stage's Parquet relative to the report, which stays valid if the root is moved."""
    return quote(Path(os.path.relpath(str(stage.path), str(report.parent))).as_posix())


def has_losses(texts: pd.DataFrame) -> bool:
    """Return whether texts have matching losses: those that are kept as written have none."""
    return bool(texts["matching_loss"].notna().any())


def best_and_worst(texts: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the texts with the lowest matching loss and, of the others, those with the highest, worst first.

    Without matching losses, return the first texts, of each class in turn, and none.
    """
    by_loss = texts.sort_values(["matching_loss", "id"])
    if not has_losses(texts):
        return alternating(by_loss, BEST_SHOWN), by_loss.head(0)
    return by_loss.head(BEST_SHOWN), by_loss.iloc[BEST_SHOWN:].iloc[::-1].head(WORST_SHOWN)


def alternating(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return the first rows, taking one of each class in turn: stages keep classes together."""
    turn = rows.groupby("label").cumcount()
    return rows.loc[turn.sort_values(kind="stable").index].head(count)


def noise_cosines(
    plan: ReleasePlan, names: Mapping[int, str], stages: Sequence[StageRecord]
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return the expected and the actual cosine of the noisy and the clean target, by class name.

    None in a run without noise. Expected cosines are empty without a target space or declared records.

    Args:
        names: the classes' names, by label.
        stages: the stages of a run, up to `target_gradient` at least.
    """
    if plan.mechanism is None:
        return None
    by_name = {stage.stage: stage for stage in stages}
    cosines = by_name["target_gradient"].figures["cosine"]
    actual = {name: cosines[str(label)] for label, name in names.items()}
    space = by_name.get("target_space")
    if space is None or plan.declared_records is None:
        return {}, actual
    expected = expected_cosines(plan.mechanism, plan.norms, space.figures, plan.declared_records)
    return {names[e.label]: e.centred if plan.target.centred else e.plain for e in expected}, actual


def _claim(run: RunRecord) -> dict[str, float]:
    """Return epsilon and delta of a valid guarantee."""
    guarantee = run.guarantee
    if guarantee.epsilon is None or guarantee.delta is None or not guarantee.safe:
        return {}
    return {"epsilon": guarantee.epsilon, "delta": guarantee.delta}


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
