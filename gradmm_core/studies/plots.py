"""The pictures of studies. Importing this module imports matplotlib, which takes most of a second."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from gradmm.outputs.plot_style import (
    BLUE,
    GREY,
    INK,
    add_legend,
    colour_of,
    described,
    new_figure,
    percent,
    sentence,
    short,
    styled,
)
from gradmm.studies.arms import PRODUCT


@styled
def accuracy_by_size(rows: pd.DataFrame, by: str = "texts") -> Figure:
    """Plot the test accuracy of each arm by the number of texts, with its interval over seeds.

    Arms without the product's sizes are horizontal lines.

    Args:
        rows: of the stage `compare` or `scarce`.
        by: the unit of `size`.
    """
    rows = rows.astype({"accuracy": float, "accuracy_half_width": float})  # None where every run has diverged
    sizes = sorted(rows.loc[rows["arm"] == PRODUCT, "size"])
    figure, axes = new_figure(f"Test accuracy by the number of {by}", by, "test accuracy")
    words = []
    lines = ("-", "--", "-.", ":")  # with six colours, twelve arms look different
    for i, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
        name, colour = str(arm), colour_of(i)
        shared = of_arm[of_arm["size"].isin(sizes)]
        if shared.empty:
            (accuracy,) = of_arm["accuracy"]
            axes.axhline(accuracy, color=colour, linestyle=(0, (1, 2)), linewidth=1.5, label=short(name))
        else:
            places = [sizes.index(size) + (i - rows["arm"].nunique() / 2) * 0.03 for size in shared["size"]]
            axes.errorbar(places, shared["accuracy"], shared["accuracy_half_width"].fillna(0.0), color=colour,
                          linestyle=lines[i % len(lines)], marker="o", markersize=4, linewidth=1.5, elinewidth=1,
                          label=short(name))  # fmt: skip
            accuracy = shared["accuracy"].tolist()[-1]
        words.append(f"{name} {accuracy:.1%}")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    add_legend(figure)
    return described(figure, f"With the most {by}: {', '.join(words)}.")


@styled
def accuracy_by_number(rows: pd.DataFrame) -> Figure:
    """Plot the test accuracy of each arm by the number of texts, on a logarithmic axis, with its interval.

    Args:
        rows: of the stage `scale`; the model before fine-tuning, of size 0, is a horizontal line.
    """
    figure, axes = new_figure("Test accuracy by the number of texts", "texts", "test accuracy")
    words = []
    for i, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
        name, colour, last = str(arm), colour_of(i), of_arm["accuracy"].tolist()[-1]
        if of_arm["size"].tolist() == [0]:
            axes.axhline(last, color=colour, linestyle=(0, (1, 2)), linewidth=1.5, label=name)
        else:
            axes.errorbar(of_arm["size"], of_arm["accuracy"], of_arm["accuracy_half_width"].fillna(0.0),
                          color=colour, marker="o", markersize=4, linewidth=1.5, elinewidth=1,
                          label=short(name))  # fmt: skip
        words.append(f"{name} {last:.1%}")
    axes.set_xscale("log")
    sizes = sorted(set(rows["size"]) - {0})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    add_legend(figure)
    return described(figure, f"With the most texts: {', '.join(words)}.")


@styled
def accuracy_by_epsilon(rows: pd.DataFrame) -> Figure:
    """Plot the test accuracy under each guarantee, with its interval over seeds. Other arms are horizontal lines.

    Args:
        rows: of the stage `epsilon`.
    """
    private = rows[rows["epsilon"].notna()].sort_values("epsilon")
    figure, axes = new_figure("Test accuracy by epsilon", "epsilon", "test accuracy")
    axes.errorbar(private["epsilon"], private["accuracy"], private["accuracy_half_width"].fillna(0.0), color=BLUE,
                  marker="o", markersize=4, linewidth=1.5, elinewidth=1, label=PRODUCT)  # fmt: skip
    axes.set_xscale("log")
    epsilons = private["epsilon"].tolist()
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.xaxis.set_minor_locator(NullLocator())
    words = [f"epsilon {row.epsilon:g} {row.accuracy:.1%}" for row in private.itertuples()]
    for i, (arm, accuracy) in enumerate(rows.loc[rows["epsilon"].isna(), ["arm", "accuracy"]].to_numpy(), start=1):
        name = "no noise" if arm == PRODUCT else short(str(arm))
        axes.axhline(accuracy, color=colour_of(i), linestyle=(0, (1 + i, 2)), linewidth=1.5, label=name)
        words.append(f"{name} {accuracy:.1%}")
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    add_legend(figure)
    return described(figure, f"{sentence(', '.join(words))}.")


@styled
def figure_by_arm(rows: pd.DataFrame, figure_name: str, label: str) -> Figure:
    """Plot one figure of each arm with its interval, one arm below another.

    Args:
        rows: with `arm`, `figure_name` and either `<figure_name>_half_width` or `..._low` and `..._high`.
        label: of the axis.
    """
    values = rows[figure_name].to_numpy(dtype=float)
    if f"{figure_name}_half_width" in rows:
        half = rows[f"{figure_name}_half_width"].fillna(0.0).to_numpy(dtype=float)
        ends = np.stack([values - half, values + half])
    else:
        ends = rows[[f"{figure_name}_low", f"{figure_name}_high"]].to_numpy(dtype=float).T
    figure, axes = new_figure(sentence(label), label, "", height=1.4 + 0.25 * len(rows))
    places = np.arange(len(rows))
    axes.hlines(places, ends[0], ends[1], color=GREY, linewidth=1.5)
    axes.plot(values, places, "o", color=BLUE)
    axes.set_yticks(places, [short(arm) for arm in rows["arm"]])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    shares = figure_name == "accuracy"
    if shares:
        axes.xaxis.set_major_formatter(FuncFormatter(percent))
    words = [
        f"{arm} {value:.1%}" if shares else f"{arm} {value:.3g}"
        for arm, value in zip(rows["arm"], values, strict=True)
    ]
    return described(figure, f"{sentence(', '.join(words))}.")


@styled
def gradient_errors(rows: pd.DataFrame) -> Figure:
    """Plot the error of each arm's gradient along fine-tuning, of all parameters and of the head, with intervals.

    Args:
        rows: of the stage `gradients`.
    """
    figure, axes = new_figure(
        "Gradient error along fine-tuning", "fine-tuning step", "error / norm of real gradient"
    )
    words = []
    offset = 0.006 * rows["step"].max()  # keeps the intervals of one step from hiding each other
    for i, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
        name = short(str(arm))
        for part, line, face, label in (("all", "-", None, name), ("head", ":", "none", f"{name}, head")):
            of_part = of_arm[of_arm["part"] == part]
            axes.errorbar(of_part["step"] + i * offset, of_part["error"], of_part["error_half_width"].fillna(0.0),
                          color=colour_of(i), linestyle=line, marker="o", markersize=4, linewidth=1.5,
                          elinewidth=1, label=label, markerfacecolor=face)  # fmt: skip
        last = of_arm[of_arm["part"] == "all"].iloc[-1]
        words.append(f"{arm} {last['error']:.2f}" if pd.notna(last["error"]) else f"{arm} diverged")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    add_legend(figure)
    return described(figure, f"All parameters after {rows['step'].max()} steps: {', '.join(words)}.")


@styled
def bounds_and_observations(rows: pd.DataFrame) -> Figure:
    """Plot each arm's sharper bounds at each step over the observed gaps. Above the diagonal a bound holds.

    Args:
        rows: of the stage `bounds`.
    """
    figure, axes = new_figure("Bound and observation", "observed", "sharper bound", height=4.2)
    for i, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
        for observed, bound, marker, face, words in (
            ("gap", "sharp_gap_bound", "o", None, "gap"),
            ("loss_difference", "sharp_loss_bound", "D", "none", "losses"),
        ):
            axes.loglog(of_arm[observed], of_arm[bound], marker, color=colour_of(i), markersize=5,
                        markerfacecolor=face, label=f"{short(str(arm))}: {words}")  # fmt: skip
    observed = rows[["gap", "loss_difference"]].to_numpy(dtype=float)
    if np.isfinite(observed).any():
        ends = [np.nanmin(observed), np.nanmax(observed)]
        axes.plot(ends, ends, color=INK, linewidth=1, linestyle=(0, (1, 2)), label="equal")
    for axis in (axes.xaxis, axes.yaxis):  # logarithmic axes default to TeX, which is not parsed here
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    add_legend(figure)
    held, bounds = int(rows[["sharp_gap_held", "sharp_loss_held"]].to_numpy().sum()), 2 * int(rows["runs"].sum())
    return described(figure, f"{held} of {bounds} bounds of single runs held.")
