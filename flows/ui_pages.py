"""What Prefect's UI is to say of a stage and of a run, as Markdown; `flows.ui_artifacts` puts it there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flows.ui_markdown import Markdown, document, escaped, inert, table
from gradmm_core.location import Location
from gradmm_core.recipe import Recipe
from gradmm_core.report import FILTERS, best_and_worst, duration, figure, key_figures, percent, points, read_line
from gradmm_core.run_record import RunRecord, StageRecord
from tasks.stages import OF_STUDIES

TABLE_ROWS, SAMPLE_ROWS = 50, 8

TEXT_COLUMNS = ("id", "text", "label", "label_name", "matching_loss", "log_perplexity")

WHAT = {
    "target_space": "Decides where the target lives, from text that the model writes itself. "
    "Nothing private is read.",
    "mechanism_audit": "Puts canaries through the clipping and the noise, before anything private is read.",
    "target_gradient": "Sums the clipped gradients of each class's real examples; adds noise once, if asked to.",
    "generation": "Searches for texts whose gradients point the way of their class's target.",
    "label_filter": "Drops texts that the model, shown public examples, and the probe take for another class.",
    "loss_selection": "Drops duplicates and near ones, and keeps the texts that match best.",
    "category_balance": "Drops the worst texts of classes that match worse than the best one.",
    "finetune_eval": "Fine-tunes the model on the texts that are left, and on as many real ones.",
    "mia_audit": "Attacks the model fine-tuned on the texts: can it tell members from others by their loss?",
    "memorisation": "Holds the texts against real ones, and against as many held-out ones for a yardstick.",
    "coresets": "Selects real rows that stand for all of them: herding and k-center.",
    "arm_eval": "Fine-tunes the model on one arm of a comparison, at one size and with one seed.",
    "arm_measures": "Measures how an arm's texts read, and how near they are to real ones.",
    "compare": "Puts all arms of a comparison in one table.",
    "scarce": "Holds texts made from few real rows against these rows.",
    "transfer": "Holds what texts are worth to other models against what others are.",
    "ablate": "Holds the recipe against versions of it that lack a part.",
    "epsilon": "Holds the recipe's texts under several guarantees against those without noise.",
    "distribution": "Tells how near the texts are to real ones, with intervals.",
    "gradient_path": "Fine-tunes on one arm's texts, and holds their gradients against those of real rows.",
    "gradients": "Tells how far the gradients of all arms are from real ones along fine-tuning.",
    "bounds": "Holds the theory's bounds against what was observed along fine-tuning.",
}

#: Stages whose figures are measured on private data. Of these no row is shown, whatever it holds.
PRIVATE = ("target_gradient", "arm_eval", "finetune_eval", "mia_audit", "memorisation", *OF_STUDIES)

PRIVATE_NOTE = "Measured on private data: for your eyes, not for publication."


#: Measures of `memorisation`.
REPEATS = {
    "nearest": "similarity of the nearest",
    "longest_run": "longest run in words",
    "longest_substring": "longest substring in characters",
    "ngram_overlap": "share of 8-grams",
}


@dataclass(frozen=True)
class Page:
    """`summary`: the line that the UI shows on the artifact's card. Both are Markdown."""

    summary: str
    markdown: str


def _making(record: StageRecord) -> str:
    if record.cached:
        return "Found in the cache: nothing had to be computed."
    memory = f", with a peak of {record.memory} in memory" if record.memory else ""
    return f"Made in this run, in {duration(record.seconds)}{memory}."


def stage_page(record: StageRecord, recipe: Recipe, plot: str = "") -> Page:
    """What a stage did, in figures, a plot (in Markdown) and some of its texts, and where its rows are."""
    names = recipe.class_names
    summary = stage_summary(record, names)
    parts = [
        f"# {title(record)}",
        WHAT.get(record.stage, ""),
        f"**{summary}**",
        _making(record),
        PRIVATE_NOTE if record.stage in PRIVATE else "",
        plot,
        table(["figure", "value"], _figures(record, names)),
        *_samples(record),
        "## The rows",
        f"`import pandas as pd`, then paste this line ({figure(record.rows)} rows):",
        f"```python\n{read_line(record)}\n```",
        table(["Parquet", record.path.name], [("folder", str(record.path.parent)), ("SHA-256", record.sha256)]),
    ]
    return Page(summary, document(parts))


def run_page(run: RunRecord, folder: Location, texts: pd.DataFrame, links: Mapping[str, str]) -> Page:
    """The verdict, the results, the guarantee, the best and the worst sentences, and where the rest is.

    Args:
        folder: of the run.
        texts: the rows that the last filter kept.
        links: of stages' pages, relative to the page's own address.
    """
    names = run.recipe.class_names
    evaluation, audit = run.stage("finetune_eval").figures, run.stage("mia_audit").figures
    counts = Counter(texts["label"].tolist())
    kept = ", ".join(f"{counts[label]} {escaped(name)}" for label, name in names.items())
    before, synthetic, real = (percent(evaluation[f"accuracy_{arm}"]) for arm in ("before", "synthetic", "real"))
    safe = run.guarantee.epsilon is not None and run.guarantee.safe
    promise = f"epsilon {run.guarantee.epsilon:g}" if safe else "NO GUARANTEE"
    best, worst = best_and_worst(texts)
    parts = [
        f"# {escaped(run.recipe.name)}: {len(texts)} texts",
        f"- **{len(texts)} texts** ({kept}) are left of {figure(run.stage('generation').rows)}; "
        f"the run took {duration(run.seconds)}.\n"
        f"- **Accuracy {before} → {synthetic}** on them, {real} on as many real ones.\n"
        f"- **{promise}**; membership inference has an advantage of "
        f"{points(audit['advantage'], audit['advantage_std'])}{_detectable(audit)}.",
        PRIVATE_NOTE,
        "## Results",
        table(
            ["fine-tuned on", "accuracy, best on validation", "accuracy, best on test", "learning rate"],
            [("nothing", before, "", ""), *_arms(evaluation)],
        ),
        "## The guarantee",
        escaped(run.guarantee.sentence),
        f"## The {len(best)} best sentences",
        _text_table(best),
        *([f"## The {len(worst)} worst", _text_table(worst)] if len(worst) else []),
        "## The stages",
        table(
            ["stage", "time", "rows", "result"],
            [
                (
                    Markdown(f"[{title(stage)}]({links[stage.stage]})" if stage.stage in links else title(stage)),
                    "cached" if stage.cached else duration(stage.seconds).replace(" ", "\N{NO-BREAK SPACE}"),
                    figure(stage.rows),
                    Markdown(stage_summary(stage, names)),
                )
                for stage in run.stages
            ],
        ),
        "## The files",
        table(
            ["what", "where"],
            [
                ("to publish" if safe else "as private as the data", str(folder / "release")),
                ("private report", str(folder / "report.html")),
                ("all figures, private", str(folder / "run.json")),
            ],
        ),
    ]
    return Page(f"{promise}: accuracy {before} → {synthetic} (real: {real}), {len(texts)} texts", document(parts))


def refusal_page(recipe: Recipe, refusal: Exception) -> Page:
    """Why a run was not begun, or not gone on with."""
    parts = [
        f"# {escaped(recipe.name)}: no further release",
        f"**{escaped(str(refusal))}**",
        "No noise was drawn and nothing was released. `gradmm privacy` with the recipe and its root prints "
        "the releases so far, and what they come to.",
    ]
    return Page("the privacy budget is used up", document(parts))


def sample_rows(texts: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for a table of the UI: JSON values only, from all classes in turn, no more than it shows well."""
    return [
        {
            "class": inert(row["label_name"]),
            "matching loss": _rounded(row["matching_loss"], 4),
            "log-perplexity": _rounded(row["log_perplexity"], 2),
            "text": inert(row["text"]),
        }
        for row in _in_turn(texts, TABLE_ROWS).to_dict("records")
    ]


def title(record: StageRecord) -> str:
    return record.stage.replace("_", " ")


# ------------------------------------------------------------------------------------------------ stages in words


def stage_summary(record: StageRecord, names: Mapping[int, str]) -> str:
    """What a stage did in one line of Markdown."""
    figures = record.figures
    match record.stage:
        case "target_space":
            coordinates = f"{figure(figures['coordinates'])} coordinates for each class"
            probe = figures["probe_dimensions"]
            return f"{coordinates}, a probe of {probe}" if probe else coordinates
        case "mechanism_audit":
            return (
                f"epsilon is at least {figures['certified_epsilon']:.2f} by {figure(figures['draws'])} draws "
                f"(claimed {figures['claimed_epsilon']:g})"
            )
        case "target_gradient":
            records = (
                f"{figure(sum(figures['records'].values()))} records, {percent(figures['clip_fraction'])} clipped"
            )
            if "probe_trust" in figures:
                records += f", a probe trusted {percent(figures['probe_trust'])}"
            if figures["sigma"] is None:
                return f"{records}, no noise"
            cosines = ", ".join(f"{cosine:.2f}" for cosine in figures["cosine"].values())
            return f"{records}, noise of sigma {figures['sigma']:.3g}, cosine with the clean target {cosines}"
        case "generation":
            trusts = [percent(trust) for trust in figures["target_trust"].values() if trust is not None]
            target = f"a target trusted {', '.join(trusts)}, " if trusts else ""
            return f"{figure(record.rows)} texts, {target}{_quality(figures)}"
        case "label_filter" | "loss_selection" | "category_balance":
            by_class = ", ".join(
                f"{figure(figures['kept_by_label'].get(str(label), 0))} {escaped(name)}"
                for label, name in names.items()
            )
            return (
                f"{figure(figures['kept'])} of {figure(record.rows)} texts left ({by_class}), {_quality(figures)}"
            )
        case "finetune_eval":
            return (
                f"accuracy {percent(figures['accuracy_before'])} → {_accuracy(figures, 'synthetic')}, "
                f"{_accuracy(figures, 'real')} on as many real texts"
            )
        case "mia_audit":
            return f"advantage {points(figures['advantage'], figures['advantage_std'])}, AUC {figures['auc']:.3f}"
        case "memorisation":
            return (
                f"{figure(figures['copies_of_any_member'])} copies of members, at most "
                f"{figure(figures['longest_run_any_member_max'])} of a member's words in a row"
            )
    return f"{figure(record.rows)} rows"


def _quality(figures: Mapping[str, Any]) -> str:
    probe = f", the probe's {figures['mean_probe_loss']:.3f}" if "mean_probe_loss" in figures else ""
    perplexity = f"log-perplexity {figures['mean_log_perplexity']:.2f}"
    return f"matching loss {figures['mean_matching_loss']:.3f}{probe}, {perplexity}"


def _accuracy(figures: Mapping[str, Any], arm: str, which: str = "") -> str:
    """Over one seed the standard deviation is zero, and says nothing."""
    return percent(figures[f"accuracy_{arm}{which}"], figures[f"accuracy_{arm}{which}_std"] or None)


def _arms(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    arms = [name.removeprefix("learning_rate_") for name in figures if name.startswith("learning_rate_")]
    return [
        (
            f"{arm} texts",
            _accuracy(figures, arm),
            _accuracy(figures, arm, "_best_on_test"),
            f"{figures[f'learning_rate_{arm}']:g}",
        )
        for arm in arms
    ]


def _detectable(audit: Mapping[str, Any]) -> str:
    least, records = audit["detectable_advantage"], f"{audit['test_records']} members"
    return f" ({records} can show {'none' if least is None else f'one from {points(least)} on'})"


def _figures(record: StageRecord, names: dict[int, str]) -> list[tuple[str, str]]:
    """A stage's figures, rounded, with names that are words."""
    figures = record.figures
    match record.stage:
        case "finetune_eval":
            return [
                ("accuracy before fine-tuning", percent(figures["accuracy_before"])),
                *((f"accuracy on {arm}", f"{best} ({test} at the one that is best on test), learning rate {rate}")
                  for arm, best, test, rate in _arms(figures)),
            ]  # fmt: skip
        case "mia_audit":
            rates = ("tpr_at_1_fpr", "TPR at 1% FPR"), ("tpr_at_01_fpr", "TPR at 0.1% FPR")
            least, power = figures["detectable_advantage"], figures["power"]
            return [
                ("advantage (TPR - FPR)", points(figures["advantage"], figures["advantage_std"])),
                ("area under the ROC curve", f"{figures['auc']:.3f} ± {figures['auc_std']:.3f}"),
                *((words, percent(figures[name], figures[f"{name}_std"])) for name, words in rates),
                ("members in the test, and as many others", figure(figures["test_records"])),
                ("detected four times in five", "none" if least is None else f"from {points(least)} on"),
                (
                    "chance to detect what the guarantee allows",
                    "no guarantee" if power is None else percent(power),
                ),
            ]
        case "memorisation":
            return [
                ("copies of members", figure(figures["copies_of_any_member"])),
                *((words, _both_sides(figures, measure)) for measure, words in REPEATS.items()),
                ("nearer to a member than to a held-out text", percent(figures["share_nearer_member"])),
                ("p of a sign test of that", figure(figures["sign_test_p"])),
            ]
        case "mechanism_audit":
            return [(name.replace("_", " "), figure(value)) for name, value in figures.items()]
    return key_figures(record, names)


def _both_sides(figures: Mapping[str, Any], measure: str) -> str:
    return ", ".join(
        f"{words} {figure(figures[f'{measure}_{side}_mean'])} (at most {figure(figures[f'{measure}_{side}_max'])})"
        for side, words in (("member", "members"), ("non_member", "held-out texts"))
    )


# --------------------------------------------------------------------------------------------------------- samples


def _samples(record: StageRecord) -> list[str]:
    """The first texts of each class; of a filter also the first that it dropped, and why."""
    if record.stage == "generation":
        return ["## Some of the texts", _text_table(_in_turn(record.read(TEXT_COLUMNS), SAMPLE_ROWS))]
    if record.stage not in FILTERS:
        return []
    rows = record.read([*TEXT_COLUMNS, "kept", "reason"])
    dropped = rows[~rows["kept"]]
    return [
        "## Some of the texts that are left",
        _text_table(_in_turn(rows[rows["kept"]], SAMPLE_ROWS)),
        *(
            ["## Some that were dropped", _text_table(_in_turn(dropped, SAMPLE_ROWS), reason=True)]
            if len(dropped)
            else []
        ),
    ]


def _text_table(rows: pd.DataFrame, reason: bool = False) -> str:
    """Texts stand last: the UI cuts wide tables off, and does not break their lines everywhere."""
    headings = ["class", "matching loss", "log-perplexity", *(["why dropped"] if reason else []), "text"]
    return table(
        headings,
        [
            (
                row["label_name"],
                f"{row['matching_loss']:.3f}",
                f"{row['log_perplexity']:.2f}",
                *([row["reason"]] if reason else []),
                row["text"],
            )
            for row in rows.to_dict("records")
        ],
    )


def _in_turn(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    """The first rows of each class, a row of each in turn: stages keep classes together."""
    turn = rows.groupby("label").cumcount()
    return rows.loc[turn.sort_values(kind="stable").index].head(count)


def _rounded(value: float, digits: int) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None
