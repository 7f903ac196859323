"""Write the tables and draw the picture of docs/results from the data beside them.

    python -m benchmarks.results_page

README.md: accuracy of the product, the rivals and real rows on every set. rivals.md: the rivals with hard and soft
labels. epsilon.svg: accuracy by epsilon. The lines between the marks in the pages are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradmm.outputs.plot_style import BLUE, BROWN, GREEN, GREY, INK, PURPLE, VERMILION, described, styled, svg
from gradmm.studies.arms import PRODUCT

DATA = Path(__file__).parents[1] / "docs" / "results" / "data"
PAGE, RIVALS_PAGE = DATA.parent / "README.md", DATA.parent / "rivals.md"

#: Comments around the table in a page.
BEGIN, END = "<!-- written by benchmarks.results_page -->", "<!-- end -->"

#: Studies of `benchmarks.evidence` that the pages show where they have been run. The last that has an arm counts.
RIVAL_STUDIES = (
    "sst2-adapters",
    "sst2-rivals",
    "sst2-few-shot",
    "sst2-rivals-epsilon-0.05",
    "rotten_tomatoes-adapters",
    "rotten_tomatoes-rivals",
    "rotten_tomatoes-rivals-epsilon-0.05",
    "emotions-evolution-10",
    "emotions-adapters",
    "emotions-rivals",
    "emotions-rivals-epsilon-0.05",
    "emotions-six-adapters",
    "emotions-six-rivals",
    "emotions-six-rivals-epsilon-0.05",
    "imdb-rivals",
    "imdb-few-shot",
    "imdb-adapters",
    "imdb-rivals-epsilon-0.05",
)
STUDIES = (
    "largest-class",
    "emotions-epsvec",
    *RIVAL_STUDIES,
    "emotions-random",
    "emotions-six-random",
    "rotten_tomatoes-random",
    "sst2-random",
    "imdb-random",
    "emotions-2000",
    "emotions-texts",
    "rotten_tomatoes-texts",
    "sst2-texts",
    "emotions-six-2000",
    "emotions-six-1000-steps",
    "imdb-2000",
    "imdb-more-epsilons",
    "rotten_tomatoes-more-epsilons",
    "sst2-more-epsilons",
    "emotions-epsilons",
    "emotions-six-epsilons",
    "rotten_tomatoes-epsilons",
    "sst2-epsilons",
    "imdb-epsilons",
)

#: Each set's title, and its number of private records.
SETS = {
    "sst2": ("SST-2", 66_349),
    "rotten_tomatoes": ("rotten_tomatoes", 8530),
    "tweet_emotions": ("emotions (two)", 9528),
    "tweet_emotions_six": ("emotions (six)", 15_500),
    "imdb": ("imdb", 4500),
}
#: Epsilons of the picture, where they have been measured, and "none" without noise.
EPSILONS = ("0.01", "0.05", "0.2", "1", "8", "none")

#: Distance of one curve's points from the next one's, in distances of two epsilons, so that none hides another.
ASIDE = 0.07

#: Pairs of axes beside one another in the picture.
COLUMNS = 3

#: Arms with a point for each epsilon, by their names in the data: label, colour, marker.
CURVES = {
    "gradmm": ("gradmm", BLUE, "o"),
    "private-evolution, soft labels": ("Private Evolution, soft labels", VERMILION, "s"),
    "private-evolution": ("Private Evolution", BROWN, "^"),
    "epsvec, soft labels": ("EPSVec, soft labels", GREEN, "D"),
    "dp-few-shot, soft labels": ("DP few-shot, soft labels", PURPLE, "v"),
    "dp-adapters, soft labels": ("DP adapters, soft labels", GREY, "P"),
}

#: Arms without noise: label, colour, line style.
LINES = {
    "all rows": ("all real rows", INK, "-"),
    "real-1k": ("1,000 real rows", GREEN, "--"),
    "real-100": ("100 real rows", PURPLE, "-."),
    "before": ("before", GREY, ":"),
}


def measured() -> pd.DataFrame:
    """Read the accuracies by set, arm and epsilon; the figures of later studies replace those of earlier ones.

    Where a file has an arm with several numbers of steps, the highest accuracy counts.
    """
    older = pd.read_csv(DATA / "written.csv", dtype={"epsilon": str}).fillna({"epsilon": ""})
    older = older.replace({"arm": {"random": "real-100"}})  # 100 of them
    files = [DATA / f"{name}.csv" for name in STUDIES]
    parts = [older, *(_by_epsilon(pd.read_csv(file)) for file in files if file.exists())]
    keys = ["set", "arm", "epsilon"]
    best = [part.sort_values("accuracy").drop_duplicates(keys, keep="last") for part in parts]
    return pd.concat(best, ignore_index=True).drop_duplicates(keys, keep="last")


def _by_epsilon(table: pd.DataFrame) -> pd.DataFrame:
    """Take the epsilon out of the arms' names: a study has `epsvec, soft labels, epsilon 1`."""
    named = table["arm"].str.extract(r"^(?P<arm>.*?)(?:, epsilon (?P<epsilon>[\d.]+))?$")
    epsilon = named["epsilon"].fillna(named["arm"].map({"gradmm": "none"})).fillna("")
    return table.assign(arm=named["arm"].replace({"random": "real-2k"}), epsilon=epsilon)  # as many as texts


#: Titles of the rivals, by their arms.
RIVALS = {
    "private-evolution": "Private Evolution",
    "private-evolution-10": "Private Evolution, ten iterations",
    "epsvec": "EPSVec",
    "epsvec-2": "EPSVec, twice the strength",
    "dp-few-shot": "DP few-shot",
    "dp-adapters": "DP adapters",
}

#: Rows of the table: title, arm and epsilon.
ROWS = (
    ("largest class", "largest class", ""),
    ("before fine-tuning", "before", ""),
    ("the calibrated model, no training", "calibrated model", ""),
    ("100 real rows", "real-100", ""),
    ("1,000 real rows", "real-1k", ""),
    ("2,000 real rows", "real-2k", ""),
    ("all real rows", "all rows", ""),
    *(
        (f"{title}, soft labels, epsilon {epsilon}", f"{arm}, soft labels", epsilon)
        for arm, title in RIVALS.items()
        for epsilon in ("0.05", "1")
        if arm != "epsvec-2"  # only on the page of the rivals
    ),
    ("**gradmm, epsilon 0.05**", "gradmm", "0.05"),
    ("**gradmm, epsilon 1**", "gradmm", "1"),
    ("**gradmm, no noise**", "gradmm", "none"),
)


def shown(data: pd.DataFrame) -> dict[str, tuple[str, int]]:
    """Return the sets that have been measured."""
    return {name: of_set for name, of_set in SETS.items() if (data["set"] == name).any()}


def table(data: pd.DataFrame) -> str:
    """Write the table of accuracies in Markdown; arms that no set has are left out."""
    sets = shown(data)
    cells_of = _cells(data, "accuracy")
    lines = [["", *(title for title, _ in sets.values())], ["---"] * (1 + len(sets))]
    lines.append(["private records", *(f"{records:,}" for _, records in sets.values())])
    for title, arm, epsilon in ROWS:
        cells = [cells_of.get((name, arm, epsilon), "") for name in sets]
        if any(cells):
            lines.append([title, *cells])
    return _markdown(lines)


def rivals_table() -> str:
    """Write the table of rivals in Markdown: every one with hard and soft labels, beside the product.

    The product's row of a set and an epsilon is of the same studies: fine-tuned for as many steps.
    """
    files = [DATA / f"{name}.csv" for name in RIVAL_STUDIES]
    data = pd.concat([_by_epsilon(pd.read_csv(file)) for file in files if file.exists()], ignore_index=True)
    data = data.drop_duplicates(["set", "arm", "epsilon"], keep="last")
    accuracy, lead = _cells(data, "accuracy"), _cells(data, "lead")
    distance: dict[Any, float] = data.set_index(["set", "arm", "epsilon"])["frechet_distance"].to_dict()
    heads = ["", "hard labels", "gradmm's lead", "soft labels", "gradmm's lead", "Fréchet distance"]
    lines = [heads, ["---"] * len(heads)]
    of_private = data[data["epsilon"].isin(["0.05", "1"])]
    for name, epsilon in of_private[["set", "epsilon"]].drop_duplicates().itertuples(index=False):
        key = (name, PRODUCT, epsilon)
        lines.append([f"**{SETS[name][0]}, epsilon {epsilon}**", *[""] * 5])
        lines.append([PRODUCT, "", "", accuracy[key], "", f"{distance[key]:.1f}"])
        for arm, title in RIVALS.items():
            hard, soft = (name, arm, epsilon), (name, f"{arm}, soft labels", epsilon)
            if hard in accuracy:
                figures = [accuracy[hard], lead[hard], accuracy[soft], lead[soft]]
                lines.append([title, *figures, f"{distance[soft]:.1f}"])
    return _markdown(lines)


def _cells(data: pd.DataFrame, name: str) -> dict[Any, str]:
    """Write a figure with its interval, by set, arm and epsilon."""
    of = data.set_index(["set", "arm", "epsilon"])
    values: dict[Any, tuple[float, float]] = {
        key: (row[name], row[f"{name}_ci95"]) for key, row in of.iterrows() if not pd.isna(row[name])
    }
    return {
        key: f"{value:.3f}" + ("" if pd.isna(reach) else f" ± {reach:.3f}")
        for key, (value, reach) in values.items()
    }


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@styled
def accuracy_by_epsilon(data: pd.DataFrame) -> Figure:
    """Draw one pair of axes for each set."""
    sets = shown(data)
    epsilons = [each for each in EPSILONS if (data["epsilon"] == each).any()]
    rows = -(-len(sets) // COLUMNS)
    figure = Figure(figsize=(3.4 * COLUMNS, 2.7 * rows + 0.9))
    legend: dict[str, Artist] = {}
    places = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for unused in places[len(sets) :]:
        unused.axis("off")
    for axes, (name, (title, _)) in zip(places, sets.items(), strict=False):
        _draw(axes, data[data["set"] == name].set_index(["arm", "epsilon"]), epsilons)
        axes.set_title(title)
        axes.set_xticks(range(len(epsilons)), epsilons)
        axes.set_xlim(-0.3, len(epsilons) - 0.7)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    for axes in places[::COLUMNS]:
        axes.set_ylabel("test accuracy")
    for axes in places[len(sets) - COLUMNS : len(sets)]:
        axes.set_xlabel("epsilon")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4)
    return described(figure, "Test accuracy by epsilon of gradmm and rivals, beside real rows, on each data set")


def _draw(axes: Axes, of_set: pd.DataFrame, epsilons: Sequence[str]) -> None:
    accuracy: dict[Any, float] = of_set["accuracy"].to_dict()
    reach: dict[Any, float] = of_set["accuracy_ci95"].to_dict()
    for arm, (label, colour, style) in LINES.items():
        if (arm, "") in accuracy:
            axes.axhline(accuracy[arm, ""], color=colour, linestyle=style, linewidth=1.4, label=label)
    for place, (arm, (label, colour, marker)) in enumerate(CURVES.items()):
        shift = ASIDE * (place - (len(CURVES) - 1) / 2)
        points = [(x + shift, (arm, epsilon)) for x, epsilon in enumerate(epsilons) if (arm, epsilon) in accuracy]
        if points:
            x, keys = zip(*points, strict=True)
            values, bars = [accuracy[key] for key in keys], [reach[key] for key in keys]
            axes.errorbar(x, values, yerr=bars, color=colour, marker=marker, capsize=3, label=label)


def with_table(page: str, written: str) -> str:
    """Replace what is between the marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{written}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    data = measured()
    for page, written in ((PAGE, table(data)), (RIVALS_PAGE, rivals_table())):
        page.write_text(with_table(page.read_text(), written))
    (DATA.parent / "epsilon.svg").write_text(svg(accuracy_by_epsilon(data)))
