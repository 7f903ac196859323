"""The studies of gradients along fine-tuning in Markdown: every figure from the rows of their stages."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gradmm_core.arms import PRODUCT
from gradmm_core.compare import markdown_table
from gradmm_core.intervals import CONFIDENCE, LEAST_SEEDS, SeedMean

_INTERVALS = f"Means over seeds, and {CONFIDENCE:.0%} intervals (Student) from {LEAST_SEEDS} seeds on."

#: What the product's error is by the sign of the difference.
_WORDS = {"lower": "nearer", "higher": "farther"}


def gradients_markdown(table: pd.DataFrame) -> str:
    """Errors of both parts, cosines and losses.

    Args:
        table: rows of the stage `gradients`.
    """
    parts = []
    for part, words in (("all", "all parameters"), ("head", "the output head")):
        rows = table[table["part"] == part]
        parts += [
            f"## Gradient error of {words}",
            f"||g_arm - g_real|| / ||g_real|| and, in brackets, the cosine, of mean gradients at the same "
            f"parameters, by the steps taken on the arm's own texts. {_INTERVALS}",
            _grid(rows, ["error", "cosine"]),
            *_leads(rows),
        ]
    parts += [
        "## Losses",
        "Mean response loss (nats) of the real rows and, in brackets, of the arm's own texts.",
        _grid(table[table["part"] == "all"], ["real_loss", "arm_loss"]),
    ]
    return "\n\n".join(parts)


def bounds_markdown(table: pd.DataFrame) -> str:
    """The theory's quantities, and both bounds beside what was observed.

    Args:
        table: rows of the stage `bounds`.
    """
    quantities = ["start_gap", "drift", "real_smoothness", "arm_smoothness", "gap_smoothness"]
    names = [[row["arm"], str(row["step"])] for row in table.to_dict("records")]
    theory = [[_figure(row, quantity) for quantity in quantities] for row in table.to_dict("records")]
    parts = [
        "## What the theory is about",
        "Of all parameters: the gap of the gradients at the start, the drift, and the smoothness of the real "
        "loss, of the arm's, and of their difference. Smoothness is estimated from below, by secants between "
        f"measured points of which the step's own is none. {_INTERVALS}",
        markdown_table(
            ["arm", "step", "e_0", "D_t", "b of real", "b of arm", "b of difference"],
            [name + line for name, line in zip(names, theory, strict=True)],
        ),
    ]
    runs = int(table["runs"].sum())
    for observed, name, words in (
        ("gap", "Lemma: e_t <= e_0 + b D_t", "gap e_t"),
        ("loss", "Theorem: the two losses' changes differ by at most e_0 D_t + b D_t^2 / 2", "loss difference"),
    ):
        figures = [
            "gap" if observed == "gap" else "loss_difference",
            f"{observed}_bound",
            f"sharp_{observed}_bound",
        ]
        held = [f"{observed}_held", f"sharp_{observed}_held"]
        lines = [
            [*label, *(_figure(row, figure) for figure in figures), *(f"{row[h]} of {row['runs']}" for h in held)]
            for label, row in zip(names, table.to_dict("records"), strict=True)
        ]
        totals = " and ".join(f"{int(table[each].sum())} of {runs}" for each in held)
        parts += [
            f"## {name}",
            "By the sum of both losses' smoothness, and sharper by that of their difference.",
            markdown_table(["arm", "step", words, "bound", "sharper bound", "held", "sharper held"], lines),
            f"They held in {totals} cases. With the true constants both always do; with estimates they can fail.",
        ]
    return "\n\n".join(parts)


def _grid(rows: pd.DataFrame, figures: Sequence[str]) -> str:
    """A line for each arm, a column for each step."""
    lines = [
        [
            f"{arm}, {of_arm['texts'].tolist()[0]:,.0f} texts",
            *(_pair(row, figures) for row in of_arm.to_dict("records")),
        ]
        for arm, of_arm in rows.groupby("arm", sort=False)
    ]
    return markdown_table(["arm", *map(str, rows["step"].unique())], lines)


def _leads(rows: pd.DataFrame) -> list[str]:
    """Nothing where the product is by itself, or all runs have diverged."""
    compared = rows.dropna(subset=["verdict"])
    if compared.empty:
        return []
    within = int((compared["verdict"] == "within noise").sum())
    lines = [
        [str(arm), *(_lead(row) for row in of_arm.to_dict("records"))]
        for arm, of_arm in rows[rows["arm"].isin(compared["arm"])].groupby("arm", sort=False)
    ]
    return [
        f"{PRODUCT}'s error minus the arm's, paired by seed:",
        markdown_table(["arm", *map(str, rows["step"].unique())], lines),
        f"{within} of {len(compared)} differences are within noise.",
    ]


def _lead(row: dict) -> str:
    if pd.isna(row["verdict"]):
        return "diverged"
    difference = _figure(row, "difference")
    sign = "" if difference.startswith("-") else "+"
    return f"{sign}{difference}, {_WORDS.get(row['verdict'], row['verdict'])}"


def _pair(row: dict, figures: Sequence[str]) -> str:
    first, second = (_figure(row, figure) for figure in figures)
    return f"{first} ({second})"


def _figure(row: dict, name: str) -> str:
    if pd.isna(row[name]):
        return "diverged"
    half_width = row[f"{name}_half_width"]
    return SeedMean(row[name], None if pd.isna(half_width) else half_width, row["runs"]).text(3)
