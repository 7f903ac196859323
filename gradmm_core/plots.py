"""What stages did, as plots: for the report (SVG that takes on the page's colours) and for the UI (PNG).

Figures are made without pyplot: nothing is shown, and no figure outlives its last reference. Importing this
module imports matplotlib, which takes most of a second: import it where a plot is made.
"""

from __future__ import annotations

import functools
import io
import re
import threading
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from scipy.stats import beta

from gradmm_core.arms import PRODUCT
from gradmm_core.mia_audit import ROC_RATES

#: Inches. Small, so that ten-point letters can still be read where a phone shrinks the plot to its width.
WIDTH, HEIGHT = 4.8, 3.4

PNG_WIDTH = 900

#: Of letters and axes. In an SVG it becomes `currentColor`.
INK = "#1c2126"

#: What `currentColor` is where no page says otherwise: 4.5 to 1 on white and on black.
INK_ON_ANY = "#767676"

#: After Okabe and Ito's for all kinds of sight, each at least 3 to 1 on white and on near-black.
BLUE, VERMILION, GREEN, PURPLE, GREY, BROWN = "#0072b2", "#d55e00", "#009e73", "#b0639a", "#808080", "#94702b"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, GREY, BROWN)

ARM_STYLES = {"synthetic": (BLUE, "-"), "real": (VERMILION, "--")}
OTHER_STYLES = ((GREEN, "-."), (PURPLE, ":"), (GREY, "-"))

CONFIDENCE = 0.95

#: About so many fit side by side.
LEGEND_LETTERS = 64

#: Of a class; longer ones are cut.
LONGEST_NAME = 24

#: Of the axis: smaller differences than a fraction of it are not to look large.
LEAST_ACCURACY_SPAN = 0.04

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.4,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
    "text.color": INK,
    "text.parse_math": False,  # a class may be called $x$
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # letters stay letters: they can be read aloud, searched, and take the page's font
    "svg.hashsalt": "gradmm",
}

_SVG = "http://www.w3.org/2000/svg"
_XLINK_HREF = "{http://www.w3.org/1999/xlink}href"

#: Characters that XML has no way to write.
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

_LOCK = threading.RLock()

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _style() -> Iterator[None]:
    """Our settings, whatever the user's matplotlibrc says. They are matplotlib's globals: one thread at a time."""
    with _LOCK, matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # Of a class named in letters that the font lacks. A browser has them; the PNG shows boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _styled(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with _style():
            return function(*args, **kwargs)

    return wrapper


@_styled
def loss_history(texts: pd.DataFrame) -> Figure:
    """What was minimised, after each round or iteration: median and quartiles over the texts.

    Args:
        texts: rows of `generation` or of a shard, with the column `loss_history`: a list for each text, of
            the loss at the start and after each round.

    Raises:
        ValueError: if no loss is finite.
    """
    losses = _ragged(texts["loss_history"])
    rounds = np.flatnonzero(np.isfinite(losses).any(axis=0))
    if not len(rounds):
        raise ValueError("no text has a finite loss")
    low, median, high = np.nanquantile(losses[:, rounds], [0.25, 0.5, 0.75], axis=0)
    figure, axes = _figure("Loss while generating", "round", "matching loss, and the probe's at its price")
    axes.fill_between(rounds, low, high, color=BLUE, alpha=0.25, linewidth=0, label="half of the texts")
    axes.plot(rounds, median, color=BLUE, marker="o" if len(rounds) == 1 else "", label="median")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure)
    return _described(
        figure,
        f"Over {len(losses)} texts the median is {median[0]:.3g} at the start and {median[-1]:.3g} after "
        f"{rounds[-1]} rounds, where half of the texts are between {low[-1]:.3g} and {high[-1]:.3g}.",
    )


@_styled
def survivors(names: list[str], stages: list[str], counts: list[list[int]]) -> Figure:
    """The texts left after each stage, as a bar for each stage with a part for each class.

    Args:
        names: of the classes.
        stages: generation and the filters.
        counts: for each stage, the texts left of each class.
    """
    table = np.array(counts, dtype=np.int64).reshape(len(stages), len(names))
    figure, axes = _figure("Texts left after each stage", "texts", "", height=1.7 + 0.3 * len(stages))
    rows = np.arange(len(stages))
    left = np.zeros(len(stages))
    for i, name in enumerate(names):
        axes.barh(rows, table[:, i], left=left, height=0.6, color=_colour(i), linewidth=0, label=_short(name))
        left += table[:, i]
    for row, total in zip(rows, table.sum(axis=1).tolist(), strict=True):
        axes.annotate(str(total), (total, row), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [stage.replace("_", " ") for stage in stages])
    axes.set_xlim(0, 1.1 * max(1, left.max()))
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _legend(figure)
    words = [
        f"after {stage.replace('_', ' ')} {', '.join(f'{n} {name}' for n, name in zip(row, names, strict=True))}"
        for stage, row in zip(stages, table.tolist(), strict=True)
    ]
    return _described(figure, f"{_sentence('; '.join(words))}.")


@_styled
def accuracy_by_step(rows: pd.DataFrame, figures: Mapping[str, Any]) -> Figure:
    """Test accuracy of each arm at its chosen learning rate: the seeds and their mean; and that before.

    Args:
        rows: of the stage `finetune_eval`, whose `figures` name the learning rates.

    Raises:
        KeyError: if they do not.
    """
    test = rows.loc[rows["split"] == "test"]
    before = float(figures["accuracy_before"])
    figure, axes = _figure("Test accuracy by fine-tuning step", "fine-tuning step", "test accuracy")
    words = [f"Before fine-tuning {before:.1%}"]
    arms = [arm for arm in dict.fromkeys(test["arm"].tolist()) if arm != "before"]
    others = iter(OTHER_STYLES * len(arms))
    for arm in arms:
        colour, line = ARM_STYLES.get(arm) or next(others)
        of_arm = test.loc[(test["arm"] == arm) & (test["learning_rate"] == figures[f"learning_rate_{arm}"])]
        mean = of_arm.groupby("step")["accuracy"].mean()
        if of_arm["seed"].nunique() > 1:
            axes.plot(of_arm["step"], of_arm["accuracy"], "o", color=colour, alpha=0.5, markeredgewidth=0)
        axes.plot(mean.index, mean, line, color=colour, label=_short(arm), marker="o" if len(mean) == 1 else "")
        words.append(f"on {arm} texts {mean.iloc[-1]:.1%} after {mean.index[-1]} steps")
    axes.axhline(before, color=INK, linestyle=(0, (1, 2)), linewidth=1.5, label="before fine-tuning")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    low, high = axes.get_ylim()
    wider = max(0.0, LEAST_ACCURACY_SPAN - (high - low)) / 2
    axes.set_ylim(low - wider, high + wider)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    _legend(figure)
    return _described(figure, f"{'; '.join(words)}.")


@_styled
def accuracy_by_size(rows: pd.DataFrame, by: str = "texts") -> Figure:
    """Test accuracy of each arm of a comparison by the number of texts, with its interval over seeds.

    Arms that have not the product's sizes are lines across.

    Args:
        rows: of the stage `compare`, or of `scarce`.
        by: what a size counts.
    """
    sizes = sorted(rows.loc[rows["arm"] == PRODUCT, "size"])
    figure, axes = _figure(f"Test accuracy by the number of {by}", by, "test accuracy")
    words = []
    lines = ("-", "--", "-.", ":")  # with six colours, no two of twelve arms look alike
    for i, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
        name, colour = str(arm), _colour(i)
        shared = of_arm[of_arm["size"].isin(sizes)]
        if shared.empty:
            (accuracy,) = of_arm["accuracy"]
            axes.axhline(accuracy, color=colour, linestyle=(0, (1, 2)), linewidth=1.5, label=_short(name))
        else:
            places = [sizes.index(size) + (i - rows["arm"].nunique() / 2) * 0.03 for size in shared["size"]]
            axes.errorbar(places, shared["accuracy"], shared["accuracy_half_width"].fillna(0.0), color=colour,
                          linestyle=lines[i % len(lines)], marker="o", markersize=4, linewidth=1.5, elinewidth=1,
                          label=_short(name))  # fmt: skip
            accuracy = shared["accuracy"].tolist()[-1]
        words.append(f"{name} {accuracy:.1%}")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    _legend(figure)
    return _described(figure, f"With the most {by}: {', '.join(words)}.")


@_styled
def accuracy_by_epsilon(rows: pd.DataFrame) -> Figure:
    """Test accuracy under each guarantee, with its interval over seeds; without one, a line across.

    Args:
        rows: of the stage `epsilon`.
    """
    private = rows[rows["epsilon"].notna()].sort_values("epsilon")
    figure, axes = _figure("Test accuracy by epsilon", "epsilon", "test accuracy")
    axes.errorbar(private["epsilon"], private["accuracy"], private["accuracy_half_width"].fillna(0.0), color=BLUE,
                  marker="o", markersize=4, linewidth=1.5, elinewidth=1, label=PRODUCT)  # fmt: skip
    axes.set_xscale("log")
    epsilons = private["epsilon"].tolist()
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.xaxis.set_minor_locator(NullLocator())
    words = [f"epsilon {row.epsilon:g} {row.accuracy:.1%}" for row in private.itertuples()]
    for i, (arm, accuracy) in enumerate(rows.loc[rows["epsilon"].isna(), ["arm", "accuracy"]].to_numpy(), start=1):
        name = "no noise" if arm == PRODUCT else _short(str(arm))
        axes.axhline(accuracy, color=_colour(i), linestyle=(0, (1 + i, 2)), linewidth=1.5, label=name)
        words.append(f"{name} {accuracy:.1%}")
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    _legend(figure)
    return _described(figure, f"{_sentence(', '.join(words))}.")


@_styled
def figure_by_arm(rows: pd.DataFrame, figure_name: str, label: str) -> Figure:
    """One figure of each arm with its interval, arm under arm.

    Args:
        rows: with `arm`, `figure_name` and either `<figure_name>_half_width` or `..._low` and `..._high`.
        label: the figure in words.
    """
    values = rows[figure_name].to_numpy(dtype=float)
    if f"{figure_name}_half_width" in rows:
        half = rows[f"{figure_name}_half_width"].fillna(0.0).to_numpy(dtype=float)
        ends = np.stack([values - half, values + half])
    else:
        ends = rows[[f"{figure_name}_low", f"{figure_name}_high"]].to_numpy(dtype=float).T
    figure, axes = _figure(_sentence(label), label, "", height=1.4 + 0.25 * len(rows))
    places = np.arange(len(rows))
    axes.hlines(places, ends[0], ends[1], color=GREY, linewidth=1.5)
    axes.plot(values, places, "o", color=BLUE)
    axes.set_yticks(places, [_short(arm) for arm in rows["arm"]])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    shares = figure_name == "accuracy"
    if shares:
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))
    words = [
        f"{arm} {value:.1%}" if shares else f"{arm} {value:.3g}"
        for arm, value in zip(rows["arm"], values, strict=True)
    ]
    return _described(figure, f"{_sentence(', '.join(words))}.")


@_styled
def roc(
    rows: pd.DataFrame, figures: Mapping[str, Any], epsilon: float | None = None, delta: float = 0.0
) -> Figure:
    """The membership attack's ROC curve, and what a guarantee leaves it.

    The curve is the mean over the splits. Its band is the exact 95% interval, rate by rate, for the members of one
    split: the splits share their records, and are not to be pooled. Distances from the diagonal that the audit
    misses more often than one time in five are shaded.

    Args:
        rows, figures: of the stage `mia_audit`.
        epsilon, delta: the claim; with one, all that it allows an attack is drawn too.
    """
    records = int(figures["test_records"])
    advantage, detectable = float(figures["advantage"]), figures["detectable_advantage"]
    figure, axes = _figure("Membership inference", "false positive rate", "true positive rate", height=5.0)
    diagonal = np.array([0.0, 1.0])
    if detectable is not None:
        upper = np.array([0.0, 1.0 - detectable, 1.0])
        axes.fill_between(upper, upper, np.minimum(1, upper + detectable), color=GREY, alpha=0.25, linewidth=0,
                          label="too near to guessing for this audit to see")  # fmt: skip
    axes.plot(diagonal, diagonal, color=INK, linewidth=1, linestyle=(0, (1, 2)), label="guessing")
    if epsilon is not None:
        fpr = np.linspace(0, 1, 201)
        axes.plot(
            fpr, _largest_tpr(fpr, epsilon, delta), "--", color=GREEN, label="the most that the guarantee allows"
        )
    tpr = np.stack(rows["roc"].tolist()).mean(axis=0)
    band = np.array([_clopper_pearson(rate * records, records) for rate in tpr]).T
    axes.fill_between(ROC_RATES, *band, color=BLUE, alpha=0.2, linewidth=0, label="95% interval of one split")
    axes.plot(ROC_RATES, tpr, color=BLUE, label="the attack")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.01)
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_percent))
    _legend(figure)
    seen = "" if detectable is None else f" It would see {100 * detectable:.1f} points four times in five."
    return _described(
        figure,
        f"Over {len(rows)} splits the attack's advantage is {100 * advantage:+.1f} points, the area under the "
        f"curve {figures['auc']:.3f}, the true positive rate at 1% false positives {figures['tpr_at_1_fpr']:.1%}."
        f"{seen}",
    )


@_styled
def cosines(expected: Mapping[str, float], actual: Mapping[str, float]) -> Figure:
    """Cosine of each class's noisy and clean target: what was expected of it, and what it is.

    Args:
        expected: by the name of the class; may lack some, or all.
        actual: by the name of the class, in the order of the plot.
    """
    figure, axes = _figure("Noisy against clean target", "cosine", "", height=1.6 + 0.3 * len(actual))
    rows = np.arange(len(actual))
    hoped = np.array([float(expected.get(name, np.nan)) for name in actual])
    got = np.array([float(value) for value in actual.values()])
    axes.hlines(rows, hoped, got, color=GREY, linewidth=1.5)
    if np.isfinite(hoped).any():
        axes.plot(hoped, rows, "D", color=VERMILION, markerfacecolor="none", markersize=7, label="expected")
    axes.plot(got, rows, "o", color=BLUE, label="actual")
    axes.set_yticks(rows, [_short(name) for name in actual])
    axes.set_xlim(min(0.0, float(np.nanmin([*hoped, *got])) - 0.05), 1.02)
    axes.set_ylim(len(actual) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    _legend(figure)
    words = [
        f"{name} {value:.2f}" + (f" (expected {expected[name]:.2f})" if name in expected else "")
        for name, value in actual.items()
    ]
    return _described(figure, f"{'; '.join(words)}.")


@_styled
def gradient_errors(rows: pd.DataFrame) -> Figure:
    """Error of each arm's gradient along fine-tuning with its interval over seeds: all parameters, and the head.

    Args:
        rows: of the stage `gradients`.
    """
    figure, axes = _figure("Gradient error along fine-tuning", "fine-tuning step", "error / norm of real gradient")
    words = []
    apart = 0.006 * rows["step"].max()  # so that intervals of one step do not hide each other
    for i, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
        name = _short(str(arm))
        for part, line, face, label in (("all", "-", None, name), ("head", ":", "none", f"{name}, head")):
            own = of_arm[of_arm["part"] == part]
            axes.errorbar(own["step"] + i * apart, own["error"], own["error_half_width"].fillna(0.0),
                          color=_colour(i), linestyle=line, marker="o", markersize=4, linewidth=1.5, elinewidth=1,
                          label=label, markerfacecolor=face)  # fmt: skip
        last = of_arm[of_arm["part"] == "all"].iloc[-1]
        words.append(f"{arm} {last['error']:.2f}" if pd.notna(last["error"]) else f"{arm} diverged")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _legend(figure)
    return _described(figure, f"Of all parameters after {rows['step'].max()} steps: {', '.join(words)}.")


@_styled
def bounds_and_observations(rows: pd.DataFrame) -> Figure:
    """Each arm's bounds at each step, the sharper ones, against what was observed: above the diagonal one holds.

    Args:
        rows: of the stage `bounds`.
    """
    figure, axes = _figure("Bound and observation", "observed", "sharper bound", height=4.2)
    for i, (arm, of_arm) in enumerate(rows.groupby("arm", sort=False)):
        for observed, bound, marker, face, words in (
            ("gap", "sharp_gap_bound", "o", None, "gap"),
            ("loss_difference", "sharp_loss_bound", "D", "none", "losses"),
        ):
            axes.loglog(of_arm[observed], of_arm[bound], marker, color=_colour(i), markersize=5,
                        markerfacecolor=face, label=f"{_short(str(arm))}: {words}")  # fmt: skip
    observed = rows[["gap", "loss_difference"]].to_numpy(dtype=float)
    if np.isfinite(observed).any():
        ends = [np.nanmin(observed), np.nanmax(observed)]
        axes.plot(ends, ends, color=INK, linewidth=1, linestyle=(0, (1, 2)), label="equal")
    for axis in (axes.xaxis, axes.yaxis):  # a logarithmic axis has its numbers in TeX, which is shown as it is
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    _legend(figure)
    held, of = int(rows[["sharp_gap_held", "sharp_loss_held"]].to_numpy().sum()), 2 * int(rows["runs"].sum())
    return _described(figure, f"Of {of} bounds of single runs, {held} held.")


def svg(figure: Figure) -> str:
    """The figure as one SVG element, for a page or for a file of its own. The same figure gives the same text.

    Letters are text in `currentColor`, the background is transparent, all looks are attributes, which a page's
    style sheet can overrule, and nothing is referred to but by a fragment. It names itself to screen readers.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _style():
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    root = ET.fromstring(_NO_XML.sub("\ufffd", buffer.getvalue()))
    title, description = _title(figure), _NO_XML.sub("\ufffd", str(figure.get_label()))
    _tidy(root, prefix=re.sub(r"\W+", "-", title.lower()))
    for size in ("width", "height"):
        del root.attrib[size]  # the viewBox has the shape; the page, or the viewer, decides how large
    root.attrib |= {"role": "img", "aria-label": f"{title}. {description}", "color": INK_ON_ANY}
    element = ET.Element(f"{{{_SVG}}}title")
    element.text = title
    root.insert(0, element)
    # As the default namespace. ElementTree can be told so by a global register only, or by this, which asks that
    # every attribute be without a namespace: they are, by now.
    text = ET.tostring(root, encoding="unicode").replace("ns0:", "").replace("xmlns:ns0", "xmlns")
    return re.sub(r">\s+<", ">\n<", text)


def png(figure: Figure) -> bytes:
    """The figure on white, 900 pixels wide."""
    buffer = io.BytesIO()
    with _style():
        FigureCanvasAgg(figure).print_figure(
            buffer,
            format="png",
            dpi=PNG_WIDTH / figure.get_figwidth(),
            facecolor="white",
            metadata={"Software": None},  # else matplotlib's version is in the file
        )
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------ figures


def _figure(title: str, x: str, y: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    return figure, axes


def _described(figure: Figure, description: str) -> Figure:
    """Keeps what the figure says in words with it, and lays it out for good: no drawing moves anything again."""
    figure.set_label(description)
    for artist in figure.findobj(lambda artist: artist.get_clip_on()):
        artist.set_clip_on(False)  # a clipped one would refer to its frame in the SVG
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _legend(figure: Figure) -> None:
    """Under the axes, where no line can run through it, in as many columns as fit."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lengths = [8 + len(label) for label in labels]  # with the line before it and the gap after it
    columns = next(
        n
        for n in range(len(labels), 0, -1)
        if n == 1 or sum(max(column) for column in np.array_split(lengths, n)) <= LEGEND_LETTERS
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.4)


def _short(name: str) -> str:
    """A name that fits a legend, and that matplotlib does not leave out of it for its first letter."""
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return f"\u200b{name}" if name.startswith("_") else name


def _title(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _percent(rate: float, _: int | None = None) -> str:
    return f"{100 * rate:g}%"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ragged(lists: Sequence[Any] | pd.Series) -> Float[np.ndarray, "texts rounds"]:
    """Lists of unlike lengths as one array; NaN where there is nothing, or no finite number."""
    arrays = [np.asarray(each, dtype=np.float64) for each in lists]
    table = np.full((len(arrays), max(len(each) for each in arrays)), np.nan)
    for row, each in zip(table, arrays, strict=True):
        row[: len(each)] = np.where(np.isfinite(each), each, np.nan)
    return table


def _largest_tpr(fpr: Float[np.ndarray, " n"], epsilon: float, delta: float) -> Float[np.ndarray, " n"]:
    """The highest true positive rate that (epsilon, delta)-DP allows (Kairouz, Oh and Viswanath, 2015)."""
    rising = np.exp(min(epsilon, 700.0)) * fpr + delta
    falling = 1 - np.exp(-epsilon) * (1 - delta - fpr)
    return np.clip(np.minimum(rising, falling), 0, 1)


def _clopper_pearson(hits: float, tries: int) -> tuple[float, float]:
    """Exact interval for a rate at a confidence of 95%. `hits` may be a mean of counts."""
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits <= 0 else float(beta.ppf(tail, hits, tries - hits + 1))
    high = 1.0 if hits >= tries else float(beta.isf(tail, hits + 1, tries - hits))
    return low, high


# ---------------------------------------------------------------------------------------------------------- SVG


def _tidy(root: ET.Element, prefix: str) -> None:
    """Style attributes become single ones, INK becomes `currentColor`, and names become the figure's own.

    Only what is referred to keeps its name: several plots are to share a page.
    """
    referred = {element.attrib[_XLINK_HREF][1:] for element in root.iter() if _XLINK_HREF in element.attrib}
    for element in root.iter():
        attributes = element.attrib
        for declaration in filter(None, attributes.pop("style", "").split(";")):
            name, _, value = declaration.partition(":")
            attributes |= _attributes(name.strip(), value.strip())
        if _XLINK_HREF in attributes:
            attributes["href"] = f"#{prefix}-{attributes.pop(_XLINK_HREF)[1:]}"
        if name := attributes.pop("id", None):
            attributes |= {"id": f"{prefix}-{name}"} if name in referred else {}
        for name in ("fill", "stroke"):
            if attributes.get(name) == INK:
                attributes[name] = "currentColor"
    for parent in root.iter():
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}style":
                parent.remove(child)  # its one rule is given to the root, below
            elif child.tag == f"{{{_SVG}}}defs" and not len(child):
                parent.remove(child)
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}


def _attributes(name: str, value: str) -> dict[str, str]:
    """One declaration of a style as presentation attributes, of which CSS's `font` is none."""
    if name == "font":  # matplotlib writes it where it can put all in one
        size = re.search(r"[\d.]+px", value)
        assert size, value
        return {"font-size": size.group(), "font-family": "sans-serif"}
    return {name: "sans-serif" if name == "font-family" else value}
