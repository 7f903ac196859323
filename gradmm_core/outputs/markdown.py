"""Markdown: text escaped for it, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: Syntax of CommonMark and of GitHub's and the hub's extensions (tables, links, formulas, emojis). The first group
#: is syntax at the start of a paragraph only.
_SYNTAX = re.compile(r"^[#+=-]|[\\`*_\[\]<>|~&$@]|:(?=[\w/+-])|(?<=www)\.", re.IGNORECASE)


def escape_markdown(text: str) -> str:
    """Return `text` as one line of Markdown that renders as the same characters, in table cells too."""
    return _SYNTAX.sub(r"\\\g<0>", " ".join(text.split()))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table. Cells are Markdown already."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, ["---"] * len(headings), *rows])
