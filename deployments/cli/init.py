"""The command `gradmm init`: a recipe for the user's own data."""

from __future__ import annotations

import shlex
from pathlib import Path

from gradmm.data.shape import shape_of
from gradmm.deployments.new_recipe import first_token_of, recipe_name, recipe_text
from gradmm.errors import InputError, printable


def init(data: str, text_column: str | None, label_column: str | None, model: str, out: Path | None) -> None:
    """Write a recipe and say what it took from the data.

    Raises:
        InputError: for data that cannot be read, and if the file exists.
    """
    file = out or Path(f"{recipe_name(data)}.yaml")
    if file.suffix not in (".yaml", ".yml"):
        raise InputError("does not end in .yaml", str(file), "give a name of a recipe with --out")
    if file.exists():
        raise InputError("exists already", str(file), "remove it, or give another file with --out")
    shape = shape_of(data, text_column, label_column)
    text = recipe_text(shape, model, first_token_of(model))
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        fix = "give another file with --out"
        raise InputError(f"cannot be written ({error.strerror})", str(file), fix) from error
    names = ", ".join(map(printable, shape.class_names.values()))
    print(f"wrote {file}: {len(shape.class_names)} classes ({names}), about {shape.rows:,} rows")
    for split in shape.unlabelled:
        print(f"the split {printable(split)} has no such labels: rows of train are held out in its place")
    print(
        "It has the data's column names, label values and rounded sizes, but no text. Edit the instructions, then"
    )
    written = shlex.quote(str(file))
    print(f"  gradmm check {written}\n  gradmm run {written}")
