"""The Markdown pages of a stage and of a run; `gradmm.flows.ui.artifacts` publishes them in Prefect's UI."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from gradmm.config.recipe import Recipe
from gradmm.flows.ui.markdown import Markdown, document, escaped, inert, table
from gradmm.outputs.descriptions import (
    accuracy_rows,
    stage_figures,
    stage_result,
    stage_sentence,
    stage_title,
    verdict,
)
from gradmm.outputs.formatting import duration, number, percent
from gradmm.outputs.grades import one_line
from gradmm.outputs.record import FILTERS, RunRecord, StageRecord
from gradmm.outputs.report import alternating, best_and_worst, has_losses, read_line
from gradmm.storage.location import Location
from gradmm.tasks.runtime.registry import AUDIT_STAGES, STUDY_STAGES

TABLE_ROWS, SAMPLE_ROWS = 50, 8

TEXT_COLUMNS = ("id", "text", "label", "label_name", "matching_loss", "log_perplexity")

#: Stages whose figures are measured on private data. Their rows are never shown.
PRIVATE = (
    "target_gradient",
    "arm_eval",
    "finetune_eval",
    "mia_audit",
    "memorisation",
    *AUDIT_STAGES,
    *STUDY_STAGES,
)

PRIVATE_NOTE = "Measured on private data: do not publish."


@dataclass(frozen=True)
class Page:
    """A page and its summary, the line on the artifact's card. Both are Markdown."""

    summary: str
    markdown: str


def stage_page(record: StageRecord, recipe: Recipe, plot: str = "") -> Page:
    """Return the page of a stage: result, figures, samples of its texts, and the location of its rows.

    Args:
        plot: Markdown.
    """
    result = escaped(stage_result(record, recipe))
    parts = [
        f"# {stage_title(record.stage)}",
        escaped(stage_sentence(record.stage)),
        f"**{result}**",
        _computation(record),
        PRIVATE_NOTE if record.stage in PRIVATE else "",
        plot,
        table(["figure", "value"], stage_figures(record, recipe)),
        *_samples(record, recipe),
        "## Rows",
        f"To read the {number(record.rows)} rows, run `import pandas as pd` and:",
        f"```python\n{read_line(record)}\n```",
        table(["Parquet", record.path.name], [("folder", str(record.path.parent)), ("SHA-256", record.sha256)]),
    ]
    return Page(result, document(parts))


def run_page(run: RunRecord, folder: Location, texts: pd.DataFrame, links: Mapping[str, str]) -> Page:
    """Return the page of a run: verdict, accuracies, the best and worst texts or the first ones, stages, files.

    Args:
        folder: the run's folder.
        texts: the labelled texts.
        links: addresses of the stages' pages, relative to the page.
    """
    safe = run.guarantee.epsilon is not None and run.guarantee.safe
    guarantee = f"epsilon {run.guarantee.epsilon:g}" if safe else "NO GUARANTEE"
    evaluation = run.stage("finetune_eval")
    best, worst = best_and_worst(texts)
    parts = [
        f"# {escaped(run.recipe.name)}: {len(texts)} texts",
        f"**{escaped(one_line(run))}**",
        "\n".join(f"- **{term}**: {escaped(value)}" for term, value in verdict(run)),
        f"Run time {duration(run.seconds)}. {PRIVATE_NOTE}",
        "## Accuracy",
        table(
            ["fine-tuned on", "best on validation", "best on test", "learning rate", "steps"],
            accuracy_rows(evaluation.figures, run.recipe),
        ),
        f"## The {len(best)} {'best' if has_losses(texts) else 'first'} texts",
        _text_list(best),
        *([f"## The {len(worst)} worst texts", _text_list(worst)] if len(worst) else []),
        "## Stages",
        "\n".join(
            f"- {_link(stage_title(stage.stage), links.get(stage.stage))}, "
            f"{'cached' if stage.cached else duration(stage.seconds)}, {number(stage.rows)} rows: "
            f"{escaped(stage_result(stage, run.recipe))}"
            for stage in run.stages
        ),
        "## Files",
        table(
            ["content", "location"],
            [
                ("release folder" if safe else "release folder, as private as the data", str(folder / "release")),
                ("private report", str(folder / "report.html")),
                ("all figures, private", str(folder / "run.json")),
            ],
        ),
    ]
    result = escaped(stage_result(evaluation, run.recipe))
    return Page(f"{guarantee}, {len(texts)} texts: {result}", document(parts))


def refusal_page(recipe: Recipe, refusal: Exception) -> Page:
    """Return the page of a run that the privacy budget does not allow."""
    parts = [
        f"# {escaped(recipe.name)}: release refused",
        f"**{escaped(str(refusal))}**",
        "No noise was drawn and nothing was released. `gradmm privacy` with the recipe and its root lists the "
        "releases so far and their composed epsilon.",
    ]
    return Page("privacy budget exhausted", document(parts))


def sample_rows(texts: pd.DataFrame) -> list[dict[str, Any]]:
    """Return up to `TABLE_ROWS` rows as JSON values for a table artifact, alternating between classes."""
    return [
        {
            "class": inert(row["label_name"]),
            **({"matching loss": _rounded(row["matching_loss"], 4)} if has_losses(texts) else {}),
            "log-perplexity": _rounded(row["log_perplexity"], 2),
            "text": inert(row["text"]),
        }
        for row in alternating(texts, TABLE_ROWS).to_dict("records")
    ]


def _link(title: str, address: str | None) -> Markdown:
    return Markdown(f"[{title}]({address})" if address else title)


def _computation(record: StageRecord) -> str:
    if record.cached:
        return "Found in the cache."
    memory = f", peak memory {record.memory}" if record.memory else ""
    return f"Computed in {duration(record.seconds)}{memory}."


def _samples(record: StageRecord, recipe: Recipe) -> list[str]:
    """Return tables of some generated or kept texts and, for a filter, of some dropped ones; or of words."""
    if record.stage == "word_tilt":
        return ["## Words that change most", _word_table(record.read(), recipe)]
    if record.stage == "generation":
        return ["## Sample texts", _text_list(alternating(record.read(TEXT_COLUMNS), SAMPLE_ROWS))]
    if record.stage == "labelling":
        labelled = record.read([*TEXT_COLUMNS, "probabilities"])
        return ["## Sample of the labelled texts", _text_list(alternating(labelled, SAMPLE_ROWS))]
    if record.stage not in FILTERS:
        return []
    rows = record.read([*TEXT_COLUMNS, "kept", "reason"])
    kept, dropped = (alternating(rows[rows["kept"] == is_kept], SAMPLE_ROWS) for is_kept in (True, False))
    samples = ["## Sample of the texts left", _text_list(kept)] if len(kept) else []
    if len(dropped):
        samples += ["## Sample of the dropped texts", _text_list(dropped, reason=True)]
    return samples


def _word_table(words: pd.DataFrame, recipe: Recipe) -> str:
    """Tabulate each class's words whose share of all words changes most, as released."""
    change = (words["wanted"] - words["before"]).abs()
    most = words.loc[change.sort_values(ascending=False, kind="stable").index].groupby("label").head(SAMPLE_ROWS)
    columns = ["class", "word", "the model's own share", "as released", "in the last texts"]
    rows = most.sort_values("label", kind="stable")
    return table(
        columns,
        (
            (
                recipe.class_names[row["label"]],
                inert(row["token"]),
                *(percent(row[shares], digits=2) for shares in ("before", "wanted", "written")),
            )
            for row in rows.to_dict("records")
        ),
    )


def _text_list(rows: pd.DataFrame, reason: bool = False) -> str:
    """List texts with their figures. The UI wraps a list's lines, and cuts off those of a wide table."""
    losses = has_losses(rows)

    def item(row: dict[Any, Any]) -> str:
        figures = [
            *([f"probability {max(row['probabilities']):.2f}"] if "probabilities" in row else []),
            *([f"matching loss {row['matching_loss']:.3f}"] if losses else []),
            f"log-perplexity {row['log_perplexity']:.2f}",
            *([escaped(row["reason"])] if reason else []),
        ]
        return f"- **{escaped(row['label_name'])}** ({', '.join(figures)}): {escaped(row['text'])}"

    return "\n".join(map(item, rows.to_dict("records")))


def _rounded(value: float, digits: int) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None
