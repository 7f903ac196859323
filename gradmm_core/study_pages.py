"""The tables of each study in Markdown, and its pictures: every figure from the rows of the study's own stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pandas as pd

from gradmm_core.arms import PRODUCT
from gradmm_core.compare import HONEST, MEASURES, arms_markdown, comparison_markdown, markdown_table
from gradmm_core.gradient_pages import bounds_markdown, gradients_markdown
from gradmm_core.study_record import StudyRecord, notes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Further columns of `ablate`.
GENERATED = {
    "texts": ("texts", 0),
    "matching_loss": ("matching loss", 4),
    "token_passes": ("passes per text", 0),
}


def study_page(record: StudyRecord) -> str:
    """The tables, with all that has to be known of their making."""
    parts = [
        f"# {record.recipe.name}: {record.study}",
        "\n".join(f"- {note}" for note in notes(record)),
        _PAGES[record.study](record.table.read()),
    ]
    return "\n\n".join(parts) + "\n"


def study_pictures(record: StudyRecord) -> Mapping[str, Figure]:
    """By the name of their file."""
    from gradmm_core import study_plots  # late: it imports matplotlib

    rows = record.table.read()
    if record.study == "compare" and len(record.sizes) > 1:
        return {"accuracy": study_plots.accuracy_by_size(rows)}
    if record.study == "scarce":
        return {"accuracy": study_plots.accuracy_by_size(rows, "real rows")}
    if record.study == "epsilon":
        return {"accuracy": study_plots.accuracy_by_epsilon(rows)}
    if record.study == "distribution":
        return {"frechet_distance": study_plots.figure_by_arm(rows, "frechet_distance", "Fréchet distance")}
    if record.study == "gradients":
        return {"gradient_error": study_plots.gradient_errors(rows)}
    if record.study == "bounds":
        return {"bounds": study_plots.bounds_and_observations(rows)}
    if record.study == "transfer":
        rows = rows.assign(arm=rows["model"] + ": " + rows["arm"])
    return {"accuracy": study_plots.figure_by_arm(rows, "accuracy", "test accuracy")}


def _scarce(table: pd.DataFrame) -> str:
    texts = table[table["arm"] == PRODUCT].sort_values("size")["texts"]
    said = (
        f"{PRODUCT} and the texts that the model writes without data (zero-shot) are as many as the recipe has "
        "filtered ones; `real rows` are the few themselves, which the others are to beat. By their number "
        f"{PRODUCT} has {', '.join(f'{count:,.0f}' for count in texts)} texts, a mean over seeds."
    )
    return "\n\n".join([said, comparison_markdown(table, "real rows")])


def _transfer(table: pd.DataFrame) -> str:
    parts = ["## Accuracy of other models, fine-tuned on texts for the recipe's", HONEST]
    for model, rows in table.groupby("model", sort=False):
        parts += [f"### {model}", arms_markdown(rows, {"texts": ("texts", 0)})]
    return "\n\n".join(parts)


def _ablate(table: pd.DataFrame) -> str:
    return "\n\n".join(
        [
            "## What each part brings",
            f"{HONEST} {PRODUCT} is the recipe as it is. A version with another target has another matching loss: "
            "the two are not to be compared.",
            arms_markdown(table, GENERATED | {name: MEASURES[name] for name in ("log_perplexity", "distinct_2")}),
        ]
    )


def _epsilon(table: pd.DataFrame) -> str:
    return "\n\n".join(
        [
            "## What the noise costs",
            f"{HONEST} The cosine is that of the target with noise and the one without, all classes together"
            ", where the recipe centres it of the part that the data add to public text. It is measured on the "
            "private target: for your eyes.",
            arms_markdown(
                table,
                {"target_cosine": ("cosine of the target", 3)}
                | {name: MEASURES[name] for name in ("log_perplexity", "distinct_2")},
            ),
        ]
    )


def _distribution(table: pd.DataFrame) -> str:
    measures = ("frechet_distance", "squared_mmd", "nearest_distance")
    lines = []
    for _, row in table.iterrows():
        cells = []
        for measure in measures:
            digits = MEASURES[measure][1]
            low, high = row[f"{measure}_low"], row[f"{measure}_high"]
            cells.append(f"{row[measure]:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})")
        reading = (f"{row[name]:,.{MEASURES[name][1]}f}" for name in ("log_perplexity", "distinct_2", "self_bleu"))
        lines.append([row["arm"], f"{row['texts']:,.0f}", *cells, *reading])
    names = (*measures, "log_perplexity", "distinct_2", "self_bleu")
    return "\n\n".join(
        [
            "## How near the texts are to real ones",
            "Distances of the model's hidden states from those of as many test rows, which each seed draws anew: "
            "means over seeds. In brackets, 95% of such distances for random halves of the first seed's texts "
            "and as many rows: fewer rows have larger Fréchet distances, so that the mean may lie outside. "
            "`random` are train rows: as near as real text is to itself.",
            markdown_table(["arm", "texts", *(MEASURES[name][0] for name in names)], lines),
        ]
    )


_PAGES: dict[str, Callable[[pd.DataFrame], str]] = {
    "compare": comparison_markdown,
    "scarce": _scarce,
    "transfer": _transfer,
    "ablate": _ablate,
    "epsilon": _epsilon,
    "distribution": _distribution,
    "gradients": gradients_markdown,
    "bounds": bounds_markdown,
}
