"""The page of `benchmarks.generation_methods`: tables, leads, a plot of the front, and texts as they came.

    python -m benchmarks.generation_page *.jsonl --out docs/results/generation-methods.md

The plot lies beside the page, under its name with `.svg`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.rows import mean_and_interval, read_rows
from gradmm_core.compare import markdown_table
from gradmm_core.intervals import paired_difference
from gradmm_core.plot_style import add_legend, colour_of, described, new_figure, styled, svg

COLUMNS = {
    "texts": "texts",
    "matching_loss": "mean f",
    "set_loss": "f of the set",
    "distance": "mean distance",
    "set_distance": "of the set",
    "shares": "shares",
    "log_perplexity": "log-perplexity",
    "distinct_2": "distinct-2",
    "self_bleu": "self-BLEU",
    "token_passes": "passes per text",
    "accuracy": "accuracy",
    "auc": "AUC",
}

#: What is held against the other methods, seed by seed.
PRODUCT = "search"

#: Figures with an interval, on which the product's lead is given too.
MEASURED = ("accuracy", "auc")

BEFORE = "before"

#: Behind the point; of all else three.
DIGITS = {"texts": 0, "token_passes": 0, "log_perplexity": 2}
DIGITS |= dict.fromkeys(["matching_loss", "set_loss", "distance", "set_distance"], 4)

INTRODUCTION = """\
By the loss, f is 1 - cos and the distance |g - G|^2 / |G|^2, of a text's gradient alone (the mean over texts) or
of the set's mean. The shares say how long the set's gradient is along the target, in parts of the target, class by
class. Passes are passes of one token through the model's body, a backward one counted twice; `rerank` has as many
as `search`. Means over seeds (their number in brackets), ± half a 95% interval (Student); with an epsilon each
seed has a release of its own. *Ahead by* is `search` less the method, seed by seed.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="A page of ways of generating")
    parser.add_argument("results", type=Path, nargs="+", help="what benchmarks.generation_methods wrote")
    parser.add_argument("--out", type=Path, required=True, help="the page, a .md file")
    options = parser.parse_args()
    rows = read_results(options.results)
    picture = options.out.with_suffix(".svg")
    picture.write_text(svg(front(rows)))
    options.out.write_text(page(rows, picture.name))


def read_results(files: list[Path]) -> pd.DataFrame:
    """One row for each method, seed and `title`: a recipe, model and target."""
    frame = read_rows(files)
    noise = ["no noise" if pd.isna(epsilon) else f"epsilon {epsilon:g}" for epsilon in frame["epsilon"]]
    frame["title"] = frame["recipe"] + ", " + frame["model"] + ", target `" + frame["space"] + "`, " + noise
    # Every run of the command measures the state before fine-tuning.
    return frame.drop_duplicates(["title", "method", "seed"])


def page(rows: pd.DataFrame, picture: str) -> str:
    """All of it, in Markdown."""
    made = rows[["date", "commit", "machine"]].drop_duplicates().itertuples(index=False)
    lines = ["# Ways of generating, at equal compute", "", INTRODUCTION]
    lines += [f"- `benchmarks.generation_methods`, {date}, commit {commit}, on {on}." for date, commit, on in made]
    lines += ["", f"![f against log-perplexity]({picture})"]
    for title, part in rows.groupby("title", sort=False):
        lines += ["", f"## {title}", "", table(part)]
    lines += ["", "## The first twenty texts of each method", ""]
    lines += ["Of the first seed, ten of each class, unpicked.", ""]
    for title, part in rows[rows["sample"].notna()].groupby("title", sort=False):
        lines += [f"### {title}", ""]
        for method, of_method in part.groupby("method", sort=False):
            texts = of_method.sort_values("seed")["sample"].iloc[0]
            lines += [f"**{method}**", "", *(f"{i}. `{shown(text)}`" for i, text in enumerate(texts, 1)), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(rows: pd.DataFrame) -> str:
    """Of one title: a line for each method."""
    ahead = [f"{COLUMNS[name]}, ahead by" for name in MEASURED]
    product = rows[rows["method"] == PRODUCT]
    lines = [
        [f"{method} ({len(of_method)})"]
        + [_cell(name, of_method[name].dropna()) for name in COLUMNS]
        + ["" if method == PRODUCT else _lead(product, of_method, name) for name in MEASURED]
        for method, of_method in rows.groupby("method", sort=False)
    ]
    return markdown_table(["method", *COLUMNS.values(), *ahead], lines)


def _cell(name: str, values: pd.Series) -> str:
    if values.empty:
        return ""
    if name == "shares":  # class by class
        return " / ".join(f"{fmean(of_class):.2f}" for of_class in zip(*values, strict=True))
    if name in MEASURED:
        return mean_and_interval(values, 3)
    return f"{values.mean():,.{DIGITS.get(name, 3)}f}"


def _lead(product: pd.DataFrame, rows: pd.DataFrame, name: str) -> str:
    """Over the seeds that both have; the state before fine-tuning is every seed's."""
    ours, others = product.set_index("seed")[name].dropna(), rows.set_index("seed")[name].dropna()
    if (rows["method"] == BEFORE).all():
        others = pd.Series(others.iloc[0], ours.index)
    both = ours.index.intersection(others.index)
    return paired_difference(ours[both].tolist(), others[both].tolist()).lead(3) if len(both) else ""


@styled
def front(rows: pd.DataFrame) -> Figure:
    """f against log-perplexity, one point for each method: of the first recipe, model and target."""
    first = rows.iloc[0]
    texts = rows[(rows["title"] == first["title"]) & rows["matching_loss"].notna()]
    title = f"{first['recipe']}: f against log-perplexity"
    figure, axes = new_figure(title, "log-perplexity (nats per token)", "mean f", 4.2)
    words = []
    for i, (method, of_method) in enumerate(texts.groupby("method", sort=False)):
        x, y = of_method["log_perplexity"].mean(), of_method["matching_loss"].mean()
        passes = of_method["token_passes"].mean()
        axes.scatter(
            [x], [y], color=colour_of(i), marker="osD^vP"[i // 6 % 6], label=f"{method} ({passes:,.0f} passes)"
        )
        words.append(f"{method} has f {y:.3f} at {x:.2f} nats with {passes:,.0f} passes")
    axes.set_ylim(bottom=0)
    add_legend(figure)
    return described(figure, "; ".join(words) + ".")


def shown(text: str) -> str:
    """As code, on one line."""
    return " ".join(text.replace("`", "'").split())


if __name__ == "__main__":
    main()
