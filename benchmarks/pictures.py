"""Draw the picture of docs/results from its data.

    python -m benchmarks.pictures

docs/results/epsilon.svg: accuracy by epsilon of the product and the rivals on every set, beside the model before
fine-tuning and real rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradmm.outputs.plot_style import BLUE, BROWN, GREEN, GREY, INK, PURPLE, VERMILION, described, styled, svg

DATA = Path(__file__).parents[1] / "docs" / "results" / "data"

#: Studies of `benchmarks.evidence` that the picture shows, the oldest first.
STUDIES = ("emotions-epsvec", "emotions-2000", "emotions-texts", "rotten_tomatoes-texts")

SETS = {
    "sst2": "SST-2",
    "rotten_tomatoes": "rotten_tomatoes",
    "tweet_emotions": "tweet_emotions (two classes)",
}
EPSILONS = {"0.05": "epsilon 0.05", "1": "epsilon 1", "none": "no noise"}

#: Arms with a point for each epsilon, by their names in the data: label, colour, marker.
CURVES = {
    "gradmm": ("gradmm", BLUE, "o"),
    "private-evolution, soft labels": ("Private Evolution, soft labels", VERMILION, "s"),
    "private-evolution": ("Private Evolution", BROWN, "^"),
    "epsvec, soft labels": ("EPSVec, soft labels (300 steps)", GREEN, "D"),
}

#: Arms without noise: label, colour, line style.
LINES = {
    "all rows": ("all real rows", INK, "-"),
    "real-1k": ("1,000 real rows", GREEN, "--"),
    "random": ("100 real rows", PURPLE, "-."),
    "before": ("before", GREY, ":"),
}


def measured() -> pd.DataFrame:
    """Read the accuracies by set, arm and epsilon; newer files replace older figures.

    Where a file has an arm with several numbers of steps, the highest accuracy counts.
    """
    older = pd.read_csv(DATA / "written.csv", dtype={"epsilon": str}).fillna({"epsilon": ""})
    parts = [older, *(_by_epsilon(pd.read_csv(DATA / f"{name}.csv")) for name in STUDIES)]
    keys = ["set", "arm", "epsilon"]
    best = [part.sort_values("accuracy").drop_duplicates(keys, keep="last") for part in parts]
    return pd.concat(best, ignore_index=True).drop_duplicates(keys, keep="last")


def _by_epsilon(table: pd.DataFrame) -> pd.DataFrame:
    """Take the epsilon out of the arms' names: a study has `epsvec, soft labels, epsilon 1`."""
    named = table["arm"].str.extract(r"^(?P<arm>.*?)(?:, epsilon (?P<epsilon>[\d.]+))?$")
    epsilon = named["epsilon"].fillna(named["arm"].map({"gradmm": "none"})).fillna("")
    return table.assign(arm=named["arm"], epsilon=epsilon)


@styled
def accuracy_by_epsilon(data: pd.DataFrame) -> Figure:
    """Draw one pair of axes for each set."""
    figure = Figure(figsize=(9.6, 3.6))
    legend: dict[str, Artist] = {}
    for axes, (name, title) in zip(figure.subplots(1, len(SETS)), SETS.items(), strict=True):
        _draw(axes, data[data["set"] == name].set_index(["arm", "epsilon"]))
        axes.set_title(title)
        axes.set_xticks(range(len(EPSILONS)), [*EPSILONS.values()])
        axes.set_xlim(-0.3, len(EPSILONS) - 0.7)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.axes[0].set_ylabel("test accuracy")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4)
    return described(figure, "Test accuracy by epsilon of gradmm and rivals, beside real rows, on each data set")


def _draw(axes: Axes, of_set: pd.DataFrame) -> None:
    accuracy: dict[Any, float] = of_set["accuracy"].to_dict()
    reach: dict[Any, float] = of_set["accuracy_ci95"].to_dict()
    for arm, (label, colour, style) in LINES.items():
        if (arm, "") in accuracy:
            axes.axhline(accuracy[arm, ""], color=colour, linestyle=style, linewidth=1.4, label=label)
    for arm, (label, colour, marker) in CURVES.items():
        points = [(x, (arm, epsilon)) for x, epsilon in enumerate(EPSILONS) if (arm, epsilon) in accuracy]
        if points:
            x, keys = zip(*points, strict=True)
            values, bars = [accuracy[key] for key in keys], [reach[key] for key in keys]
            axes.errorbar(x, values, yerr=bars, color=colour, marker=marker, capsize=3, label=label)


if __name__ == "__main__":
    (DATA.parent / "epsilon.svg").write_text(svg(accuracy_by_epsilon(measured())))
