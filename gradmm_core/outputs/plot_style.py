"""The common look of all plots, and their export: SVG that inherits a page's colours, and PNG.

Figures are made without pyplot, which would keep a reference to each. Importing this module imports matplotlib,
which takes most of a second: import it where a plot is made.
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

#: Inches. Small, so that ten-point text stays readable when a phone scales the plot to its width.
WIDTH, HEIGHT = 4.8, 3.4

PNG_WIDTH = 900

#: Colour of text and axes. Becomes `currentColor` in an SVG.
INK = "#1c2126"

#: Default of `currentColor`: a contrast of 4.5 to 1 on white and on black.
INK_ON_ANY = "#767676"

#: Colour-blind safe, after Okabe and Ito; a contrast of at least 3 to 1 on white and on near-black.
BLUE, VERMILION, GREEN, PURPLE, GREY, BROWN = "#0072b2", "#d55e00", "#009e73", "#b0639a", "#808080", "#94702b"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, GREY, BROWN)

#: Approximate number of characters in one row of a legend.
LEGEND_WIDTH = 64

#: Longer class names are cut.
MAX_NAME_LENGTH = 24

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
    "svg.fonttype": "none",  # keep text as text: searchable, accessible, in the page's font
    "svg.hashsalt": "gradmm",
}

_SVG = "http://www.w3.org/2000/svg"
_XLINK_HREF = "{http://www.w3.org/1999/xlink}href"

#: Characters that XML cannot represent.
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

_LOCK = threading.RLock()

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def _style() -> Iterator[None]:
    """Apply `_STYLE` instead of the user's matplotlibrc. rcParams are global, hence the lock."""
    with _LOCK, matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # For class names with glyphs that the font lacks: browsers have them, the PNG shows boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that makes a figure so that it runs under `_STYLE`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with _style():
            return function(*args, **kwargs)

    return wrapper


def new_figure(title: str, x: str, y: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """Create a figure with one pair of axes labelled `x` and `y`. `height` is in inches."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    return figure, axes


def described(figure: Figure, description: str) -> Figure:
    """Attach a text description to a figure and fix its layout."""
    figure.set_label(description)
    for artist in figure.findobj(lambda artist: artist.get_clip_on()):
        artist.set_clip_on(False)  # clipping would add a reference to a clip path in the SVG
    engine = figure.get_layout_engine()
    assert engine is not None, "made by `new_figure` under `styled`"
    engine.execute(figure)  # cheaper than a draw
    figure.set_layout_engine("none")
    return figure


def add_legend(figure: Figure) -> None:
    """Add a legend below the axes, in as many columns as fit."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lengths = [8 + len(label) for label in labels]  # with the handle and the gap
    columns = next(
        n
        for n in range(len(labels), 0, -1)
        if n == 1 or sum(max(column) for column in np.array_split(lengths, n)) <= LEGEND_WIDTH
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.4)


def short(name: str) -> str:
    """Cut a name for a legend, and add a zero-width space before an underscore, which matplotlib would omit."""
    name = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
    return f"\u200b{name}" if name.startswith("_") else name


def colour_of(index: int) -> str:
    """Return the colour of a class or arm by its index."""
    return COLOURS[index % len(COLOURS)]


def percent(rate: float, _: int | None = None) -> str:
    """Format a rate. The second argument is the tick position that `FuncFormatter` passes."""
    return f"{100 * rate:g}%"


def sentence(text: str) -> str:
    """Capitalise the first character only."""
    return text[:1].upper() + text[1:]


def svg(figure: Figure) -> str:
    """Render a figure as one SVG element, for a page or a file. The same figure gives the same text.

    Text is in `currentColor`, the background is transparent, styles are attributes that a page's style sheet can
    override, references are fragments only, and title and description are set for screen readers.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _style():
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    root = ET.fromstring(_NO_XML.sub("\ufffd", buffer.getvalue()))
    title, description = _title(figure), _NO_XML.sub("\ufffd", str(figure.get_label()))
    _tidy(root, prefix=re.sub(r"\W+", "-", title.lower()))
    for size in ("width", "height"):
        del root.attrib[size]  # the viewBox has the aspect ratio; the page sets the size
    root.attrib |= {"role": "img", "aria-label": f"{title}. {description}", "color": INK_ON_ANY}
    element = ET.Element(f"{{{_SVG}}}title")
    element.text = title
    root.insert(0, element)
    # Make SVG the default namespace: ElementTree supports that by a global registry only. No attribute has a
    # namespace at this point.
    text = ET.tostring(root, encoding="unicode").replace("ns0:", "").replace("xmlns:ns0", "xmlns")
    return re.sub(r">\s+<", ">\n<", text)


def png(figure: Figure) -> bytes:
    """Render a figure as a PNG on white, 900 pixels wide."""
    buffer = io.BytesIO()
    with _style():
        FigureCanvasAgg(figure).print_figure(
            buffer,
            format="png",
            dpi=PNG_WIDTH / figure.get_figwidth(),
            facecolor="white",
            metadata={"Software": None},  # omit matplotlib's version
        )
    return buffer.getvalue()


def _title(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


def _tidy(root: ET.Element, prefix: str) -> None:
    """Split style attributes, replace INK by `currentColor`, and drop ids without a reference.

    The other ids get a prefix, so that several plots can share a page.
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
                parent.remove(child)  # its only rule moves to the root, below
            elif child.tag == f"{{{_SVG}}}defs" and not len(child):
                parent.remove(child)
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}


def _attributes(name: str, value: str) -> dict[str, str]:
    """Translate a style declaration to presentation attributes. `font` has no such attribute and is split."""
    if name == "font":
        size = re.search(r"[\d.]+px", value)
        assert size, value
        return {"font-size": size.group(), "font-family": "sans-serif"}
    return {name: "sans-serif" if name == "font-family" else value}
