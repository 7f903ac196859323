"""Escaping of untrusted text for Prefect's UI.

The UI's Markdown is GitHub's. Cells of a table artifact are plain text in the UI's second version. In its first
they are Markdown with raw HTML, and an image in a text would be fetched.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from gradmm.outputs.markdown import escape_markdown, markdown_table

#: Longer texts are cut.
MAX_CHARACTERS = 400

#: Two invisible characters. The first UI's Markdown treats the second one as white space.
WORD_JOINER, NO_BREAK_SPACE_WITHOUT_WIDTH = "\u2060", "\ufeff"

#: Positions in an address that the second UI would turn into a link even if escaped.
_ADDRESS = re.compile(r"(?=:/)|(?<=www)(?=\.)|(?=@)", re.IGNORECASE)

#: Characters that, followed by white space, no longer start or end a tag, an entity, a link or an emphasis.
_ACTIVE = re.compile(r"[<&\\*_~:\]@]|(?<=www)\.", re.IGNORECASE)

#: Start of a line that may be a heading, a list or a quotation.
_BLOCK = re.compile(r"[#+>=-]|\d+[.)]")

#: Replaces backticks: a pair of them is code whatever is between.
LIKE_A_BACKTICK = "\u02cb"

_BIDIRECTIONAL_CONTROLS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


class Markdown(str):
    """Trusted Markdown, which `table` does not escape."""


def escaped(text: str) -> Markdown:
    """Return `text` as one line of Markdown that renders as the same characters, without links."""
    return Markdown(escape_markdown(_ADDRESS.sub(WORD_JOINER, _one_line(text))))


def inert(text: str) -> str:
    """Return `text` for a cell of a table artifact: it looks the same as plain text and as Markdown.

    A text without Markdown syntax is unchanged.
    """
    line = _one_line(text)
    stopped = _ACTIVE.sub(rf"\g<0>{NO_BREAK_SPACE_WITHOUT_WIDTH}", line).replace("`", LIKE_A_BACKTICK)
    return f"{WORD_JOINER}{stopped}" if stopped != line or _BLOCK.match(line) else line


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table. Cells that are not `Markdown` are escaped."""
    return markdown_table(
        headings, ([cell if isinstance(cell, Markdown) else escaped(cell) for cell in row] for row in rows)
    )


def document(blocks: Iterable[str]) -> str:
    """Join the non-empty blocks with empty lines."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def _one_line(text: str) -> str:
    """Replace line breaks by spaces and spell out control and bidirectional characters."""
    line = " ".join(text.split())
    shown = "".join(f"\\u{ord(character):04x}" if _controls(character) else character for character in line)
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[: MAX_CHARACTERS - 1]}…"


def _controls(character: str) -> bool:
    return (
        unicodedata.category(character) == "Cc" or unicodedata.bidirectional(character) in _BIDIRECTIONAL_CONTROLS
    )
