"""How all plots look, and what becomes of them: SVG that takes on a page's colours, and PNG.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

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

#: About so many fit side by side.
LEGEND_LETTERS = 64

#: Of a class; longer ones are cut.
LONGEST_NAME = 24

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


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Of a function that makes a figure: it has our settings, whatever the user's are."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with _style():
            return function(*args, **kwargs)

    return wrapper


def new_figure(title: str, x: str, y: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """With one pair of axes, which `x` and `y` name; the height in inches."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    return figure, axes


def described(figure: Figure, description: str) -> Figure:
    """Keeps what the figure says in words with it, and lays it out for good: no drawing moves anything again."""
    figure.set_label(description)
    for artist in figure.findobj(lambda artist: artist.get_clip_on()):
        artist.set_clip_on(False)  # a clipped one would refer to its frame in the SVG
    engine = figure.get_layout_engine()
    assert engine is not None, "made by `new_figure` under `styled`"
    engine.execute(figure)  # a drawing would do so too, and take half as long again
    figure.set_layout_engine("none")
    return figure


def add_legend(figure: Figure) -> None:
    """Under the axes, where no line can run through it, in as many columns as fit."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lengths = [8 + len(label) for label in labels]  # with the line before it and the gap after it
    columns = next(
        n
        for n in range(len(labels), 0, -1)
        if n == 1 or sum(max(column) for column in np.array_split(lengths, n)) <= LEGEND_LETTERS
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.4)


def short(name: str) -> str:
    """A name that fits a legend, and that matplotlib does not leave out of it for its first letter."""
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return f"\u200b{name}" if name.startswith("_") else name


def colour_of(index: int) -> str:
    """Of the class or arm with this number, from 0."""
    return COLOURS[index % len(COLOURS)]


def percent(rate: float, _: int | None = None) -> str:
    """For `FuncFormatter`, which hands on a tick's number too."""
    return f"{100 * rate:g}%"


def sentence(text: str) -> str:
    """With a capital at its start, and all else as it is."""
    return text[:1].upper() + text[1:]


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


def _title(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


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
