"""The law of all input: a result, or an `InputError` with a line for each problem, safe on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradmm.errors import InputError

#: Characters of the longest line that is still one to read.
LONGEST_LINE = 2000


def told(work: Callable[[], Any], *hidden: str) -> Any:
    """What `work` returns; or the lines that it was refused with, in which none of `hidden` is."""
    try:
        return work()
    except InputError as error:
        lines = str(error)
    for line in lines.split("\n"):
        assert line.isprintable(), line
        assert len(line) <= LONGEST_LINE, len(line)
        assert not [text for text in hidden if text in line], line
    return lines
