"""The plots of a run's stages. Importing this module imports matplotlib: import it late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradmm.audits.mia_audit import ROC_RATES
from gradmm.audits.repeated_draws import clopper_pearson
from gradmm.outputs.plot_style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PURPLE,
    VERMILION,
    add_legend,
    colour_of,
    described,
    new_figure,
    percent,
    sentence,
    short,
    styled,
)
from gradmm.privacy.guarantee import Guarantee, largest_tpr

ARM_STYLES = {"synthetic": (BLUE, "-"), "real": (VERMILION, "--")}
OTHER_STYLES = ((GREEN, "-."), (PURPLE, ":"), (GREY, "-"))

CONFIDENCE = 0.95

#: Minimum span of the accuracy axis.
MIN_ACCURACY_SPAN = 0.04


@styled
def loss_history(texts: pd.DataFrame) -> Figure:
    """Plot the minimised loss after each round or iteration: median and quartiles over the texts.

    Args:
        texts: rows of `generation` or of a shard. The column `loss_history` is a list per text: the loss at the
            start and after each round.

    Raises:
        ValueError: if no loss is finite.
    """
    losses = _ragged(texts["loss_history"])
    rounds = np.flatnonzero(np.isfinite(losses).any(axis=0))
    if not len(rounds):
        raise ValueError("no text has a finite loss")
    low, median, high = np.nanquantile(losses[:, rounds], [0.25, 0.5, 0.75], axis=0)
    figure, axes = new_figure("Loss during generation", "round", "matching loss + weighted probe loss")
    axes.fill_between(rounds, low, high, color=BLUE, alpha=0.25, linewidth=0, label="interquartile range")
    axes.plot(rounds, median, color=BLUE, marker="o" if len(rounds) == 1 else "", label="median")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(figure)
    return described(
        figure,
        f"Median over {len(losses)} texts: {median[0]:.3g} at the start, {median[-1]:.3g} after "
        f"{rounds[-1]} rounds, with half of the texts between {low[-1]:.3g} and {high[-1]:.3g}.",
    )


@styled
def survivors(names: list[str], stages: list[str], counts: list[list[int]]) -> Figure:
    """Plot the texts left after each stage as stacked bars, one segment per class.

    Args:
        names: class names.
        stages: generation and the filters.
        counts: texts left, by stage and class.
    """
    table = np.array(counts, dtype=np.int64).reshape(len(stages), len(names))
    figure, axes = new_figure("Texts left after each stage", "texts", "", height=1.7 + 0.3 * len(stages))
    rows = np.arange(len(stages))
    left = np.zeros(len(stages))
    for i, name in enumerate(names):
        axes.barh(rows, table[:, i], left=left, height=0.6, color=colour_of(i), linewidth=0, label=short(name))
        left += table[:, i]
    for row, total in zip(rows, table.sum(axis=1).tolist(), strict=True):
        axes.annotate(str(total), (total, row), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [stage.replace("_", " ") for stage in stages])
    axes.set_xlim(0, 1.1 * max(1, left.max()))
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    add_legend(figure)
    words = [
        f"after {stage.replace('_', ' ')} {', '.join(f'{n} {name}' for n, name in zip(row, names, strict=True))}"
        for stage, row in zip(stages, table.tolist(), strict=True)
    ]
    return described(figure, f"{sentence('; '.join(words))}.")


@styled
def confidence(texts: pd.DataFrame, names: list[str]) -> Figure:
    """Plot how many texts have which probability of their likeliest class, stacked by class.

    Args:
        texts: rows of the stage `labelling`; `label_name` and `probabilities` are used.
        names: class names.
    """
    highest = texts["probabilities"].map(max).to_numpy(dtype=float)
    of_class = [highest[(texts["label_name"] == name).to_numpy()] for name in names]
    figure, axes = new_figure("Confidence of the labels", "probability of the likeliest class", "texts")
    bins: list[float] = np.linspace(1 / len(names), 1, 21).tolist()
    colours = [colour_of(i) for i in range(len(names))]
    axes.hist(of_class, bins=bins, stacked=True, color=colours, label=[short(name) for name in names])
    axes.set_xlim(bins[0], 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    add_legend(figure)
    low, median, high = np.quantile(highest, [0.25, 0.5, 0.75])
    return described(
        figure,
        f"Probability of the likeliest class of {len(highest)} texts: {median:.2f} in the median, half of them "
        f"between {low:.2f} and {high:.2f}.",
    )


@styled
def accuracy_by_step(rows: pd.DataFrame, figures: Mapping[str, Any]) -> Figure:
    """Plot the test accuracy of each arm with its chosen schedule, seeds and mean, and before fine-tuning.

    Args:
        rows, figures: of the stage `finetune_eval`.

    Raises:
        KeyError: if an arm has no chosen learning rate or number of steps among the figures.
    """
    test = rows.loc[rows["split"] == "test"]
    before = float(figures["accuracy_before"])
    figure, axes = new_figure("Test accuracy by fine-tuning step", "fine-tuning step", "test accuracy")
    words = [f"Before fine-tuning {before:.1%}"]
    arms = [arm for arm in dict.fromkeys(test["arm"].tolist()) if arm != "before"]
    others = iter(OTHER_STYLES * len(arms))
    for arm in arms:
        colour, line = ARM_STYLES.get(arm) or next(others)
        of_arm = test.loc[
            (test["arm"] == arm)
            & (test["learning_rate"] == figures[f"learning_rate_{arm}"])
            & (test["steps"] == figures[f"steps_{arm}"])
        ]
        mean = of_arm.groupby("step")["accuracy"].mean()
        if of_arm["seed"].nunique() > 1:
            axes.plot(of_arm["step"], of_arm["accuracy"], "o", color=colour, alpha=0.5, markeredgewidth=0)
        axes.plot(mean.index, mean, line, color=colour, label=short(arm), marker="o" if len(mean) == 1 else "")
        words.append(f"on {arm} texts {mean.iloc[-1]:.1%} after {mean.index[-1]} steps")
    axes.axhline(before, color=INK, linestyle=(0, (1, 2)), linewidth=1.5, label="before fine-tuning")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    low, high = axes.get_ylim()
    wider = max(0.0, MIN_ACCURACY_SPAN - (high - low)) / 2
    axes.set_ylim(low - wider, high + wider)
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    add_legend(figure)
    return described(figure, f"{'; '.join(words)}.")


@styled
def roc(
    rows: pd.DataFrame, figures: Mapping[str, Any], epsilon: float | None = None, delta: float = 0.0
) -> Figure:
    """Plot the membership attack's mean ROC curve over the splits, and the bound of a guarantee.

    The band is the pointwise exact 95% interval for the members of one split: the splits share their records, so
    they cannot be pooled. Distances from the diagonal that the audit detects with less than 80% power are shaded.

    Args:
        rows, figures: of the stage `mia_audit`.
        epsilon, delta: the claimed guarantee; if given, the highest ROC curve that it allows is drawn.
    """
    records = int(figures["test_records"])
    advantage, detectable = float(figures["advantage"]), figures["detectable_advantage"]
    figure, axes = new_figure("Membership inference", "false positive rate", "true positive rate", height=5.0)
    diagonal = np.array([0.0, 1.0])
    if detectable is not None:
        upper = np.array([0.0, 1.0 - detectable, 1.0])
        axes.fill_between(upper, upper, np.minimum(1, upper + detectable), color=GREY, alpha=0.25, linewidth=0,
                          label="less than 80% power")  # fmt: skip
    axes.plot(diagonal, diagonal, color=INK, linewidth=1, linestyle=(0, (1, 2)), label="guessing")
    if epsilon is not None:
        fpr = np.linspace(0, 1, 201)
        axes.plot(fpr, largest_tpr(fpr, epsilon, delta), "--", color=GREEN, label="bound of the guarantee")
    tpr = np.stack(rows["roc"].tolist()).mean(axis=0)
    each_side = 1 - (1 - CONFIDENCE) / 2
    low = clopper_pearson(tpr * records, records, each_side, "lower")
    high = clopper_pearson(tpr * records, records, each_side, "upper")
    axes.fill_between(ROC_RATES, low, high, color=BLUE, alpha=0.2, linewidth=0, label="95% interval of one split")
    axes.plot(ROC_RATES, tpr, color=BLUE, label="the attack")
    _set_axes_of_rates(axes)
    add_legend(figure)
    power = "" if detectable is None else f" It detects {100 * detectable:.1f} points with 80% power."
    return described(
        figure,
        f"Over {len(rows)} splits the attack's advantage is {100 * advantage:+.1f} points, the area under the "
        f"curve {figures['auc']:.3f}, the true positive rate at 1% false positives {figures['tpr_at_1_fpr']:.1%}."
        f"{power}",
    )


@styled
def trade_off(guarantee: Guarantee) -> Figure:
    """Plot the errors that an observer of all releases cannot avoid in telling whether one unit was in the data.

    Raises:
        ValueError: without a guarantee for all releases together.
    """
    figure, axes = new_figure("What an observer cannot avoid", "false alarms", "units that are missed", height=5.0)
    false_alarms = np.linspace(0, 1, 201)
    missed = 1 - guarantee.largest_detection(false_alarms)
    axes.plot(false_alarms, 1 - false_alarms, color=INK, linewidth=1, linestyle=(0, (1, 2)), label="guessing")
    axes.fill_between(false_alarms, missed, color=GREY, alpha=0.25, linewidth=0, label="impossible")
    axes.plot(false_alarms, missed, color=BLUE, label="the guarantee")
    _set_axes_of_rates(axes)
    add_legend(figure)
    return described(figure, guarantee.in_words)


@styled
def cosines(expected: Mapping[str, float], actual: Mapping[str, float]) -> Figure:
    """Plot the expected and the actual cosine of each class's noisy and clean target.

    Args:
        expected: by class name; may lack classes.
        actual: by class name, in the order of the plot.
    """
    figure, axes = new_figure("Noisy and clean target", "cosine", "", height=1.6 + 0.3 * len(actual))
    rows = np.arange(len(actual))
    known = np.array([float(expected.get(name, np.nan)) for name in actual])
    got = np.array([float(value) for value in actual.values()])
    axes.hlines(rows, known, got, color=GREY, linewidth=1.5)
    if np.isfinite(known).any():
        axes.plot(known, rows, "D", color=VERMILION, markerfacecolor="none", markersize=7, label="expected")
    axes.plot(got, rows, "o", color=BLUE, label="actual")
    axes.set_yticks(rows, [short(name) for name in actual])
    axes.set_xlim(min(0.0, float(np.nanmin([*known, *got])) - 0.05), 1.02)
    axes.set_ylim(len(actual) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    add_legend(figure)
    words = [
        f"{name} {value:.2f}" + (f" (expected {expected[name]:.2f})" if name in expected else "")
        for name, value in actual.items()
    ]
    return described(figure, f"{'; '.join(words)}.")


def _set_axes_of_rates(axes: Axes) -> None:
    """Let both axes go from 0% to 100%, at the same scale."""
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.01)  # a line at 100% is drawn in full
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(percent))


def _ragged(lists: Sequence[Any] | pd.Series) -> Float[np.ndarray, "texts rounds"]:
    """Pad lists of different lengths to one array. Missing and non-finite values are NaN."""
    arrays = [np.asarray(each, dtype=np.float64) for each in lists]
    table = np.full((len(arrays), max(len(each) for each in arrays)), np.nan)
    for row, each in zip(table, arrays, strict=True):
        row[: len(each)] = np.where(np.isfinite(each), each, np.nan)
    return table
