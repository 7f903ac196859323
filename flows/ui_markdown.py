"""Markdown for Prefect's UI, into which untrusted texts go as what they are: text.

The UI shows texts in two ways. Its Markdown is GitHub's. The cells of a table artifact are plain text in the UI's
second version, but Markdown, HTML and all, in its first: there a text with an image in it would fetch the image.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from gradmm_core.release import escape_markdown

#: Longer texts are cut where they are shown.
SHOWN_CHARACTERS = 400

#: Two characters that nobody sees. The second one counts as white space in the first UI's Markdown.
WORD_JOINER, NO_BREAK_SPACE_WITHOUT_WIDTH = "\u2060", "\ufeff"

#: Where the second UI's Markdown would make a link of an address, however it is escaped.
_ADDRESS = re.compile(r"(?=:/)|(?<=www)(?=\.)|(?=@)", re.IGNORECASE)

#: With white space after it, none of these begins or ends a tag, an entity, a link or an emphasis.
_ACTIVE = re.compile(r"[<&\\*_~:\]@]|(?<=www)\.", re.IGNORECASE)

#: A line that begins so may be a heading, a list or a quotation.
_BLOCK = re.compile(r"[#+>=-]|\d+[.)]")

#: Nothing stops a pair of backticks from being code, but to take others.
LIKE_A_BACKTICK = "\u02cb"

_BIDIRECTIONAL_CONTROLS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


class Markdown(str):
    """Of our own making: it goes into a table as it is."""


def escaped(text: str) -> Markdown:
    """A text as one line of Markdown that shows it, in a table or a paragraph, and links nothing."""
    return Markdown(escape_markdown(_ADDRESS.sub(WORD_JOINER, _one_line(text))))


def inert(text: str) -> str:
    """A text for a cell of a table artifact: the same to the eye whether it is read as Markdown or not.

    One that Markdown has nothing to say to, as most are, stays as it is.
    """
    line = _one_line(text)
    stopped = _ACTIVE.sub(rf"\g<0>{NO_BREAK_SPACE_WITHOUT_WIDTH}", line).replace("`", LIKE_A_BACKTICK)
    return f"{WORD_JOINER}{stopped}" if stopped != line or _BLOCK.match(line) else line


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; values that are no `Markdown` are escaped."""
    cells = [[value if isinstance(value, Markdown) else escaped(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, ["---"] * len(headings), *cells])


def document(blocks: Iterable[str]) -> str:
    """Blocks with an empty line between them; empty ones are left out."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def _one_line(text: str) -> str:
    """Without line breaks; what would control a terminal or the direction of writing is spelt out."""
    line = " ".join(text.split())
    shown = "".join(f"\\u{ord(character):04x}" if _controls(character) else character for character in line)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 1]}…"


def _controls(character: str) -> bool:
    return (
        unicodedata.category(character) == "Cc" or unicodedata.bidirectional(character) in _BIDIRECTIONAL_CONTROLS
    )
