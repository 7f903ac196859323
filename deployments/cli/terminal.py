"""Output of commands: tables for people, JSON for scripts."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

#: Width of tables that are not printed on a terminal: rows stay on one line each, for `grep`.
WIDE = 200


class Terminal(Console):
    """A console for plain text: no markup, no highlighting."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(markup=False, highlight=False, width=width)

    def on_broken_pipe(self) -> None:
        """Let `main` handle the BrokenPipeError. Rich would exit with status 1."""
        raise


def print_table(table: Table, narrow: Table | None = None) -> None:
    """Print a table, or its narrow form if it does not fit."""
    terminal = Terminal(width=None if sys.stdout.isatty() else WIDE)
    fits = narrow is None or Terminal(10 * WIDE).measure(table).maximum <= terminal.width
    terminal.print(table if fits else narrow)


def print_json(value: Any) -> None:
    """Print models, dataclasses and plain values as JSON, in ASCII: no character can control a terminal."""
    from pydantic import TypeAdapter

    print(TypeAdapter(Any).dump_json(value, indent=2, ensure_ascii=True).decode())
