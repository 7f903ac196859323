"""Results as lines of JSON, and the tables that are made of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from gradmm_core.intervals import mean_over_seeds


def printed_table(parser: argparse.ArgumentParser, markdown: Callable[[pd.DataFrame], str]) -> bool:
    """Adds `--table FILE...`. Where it is given, prints the table of these results, and all is done."""
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these results, and run nothing")
    files = parser.parse_known_args()[0].table
    if files:
        print(markdown(read_rows(files)))
    return bool(files)


def read_rows(files: Iterable[Path]) -> pd.DataFrame:
    """What `report` has added to files."""
    return pd.DataFrame([json.loads(line) for file in files for line in file.read_text().splitlines()])


def mean_and_interval(values: pd.Series, digits: int) -> str:
    """With half a 95% interval (t) behind it, where there are enough values."""
    values = values.dropna().astype(float)
    return mean_over_seeds(values.tolist()).text(digits) if len(values) else ""


def report(row: dict[str, Any], file: Path | None) -> None:
    """Prints a result as it comes, without its samples, and adds it to a file."""
    print(json.dumps({name: value for name, value in row.items() if name != "sample"}), flush=True)
    if file:
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
