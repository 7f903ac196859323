"""Results as lines of JSON, and the tables that are made of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd


def printed_table(parser: argparse.ArgumentParser, markdown: Callable[[pd.DataFrame], str]) -> bool:
    """Adds `--table FILE...`. Where it is given, prints the table of these results, and all is done."""
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these results, and run nothing")
    files = parser.parse_known_args()[0].table
    if files:
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        print(markdown(pd.DataFrame(rows)))
    return bool(files)


def report(row: dict[str, Any], file: Path | None) -> None:
    """Prints a result as it comes, without its samples, and adds it to a file."""
    print(json.dumps({name: value for name, value in row.items() if name != "sample"}), flush=True)
    if file:
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
