"""The Python interface: distil a data frame, a data set or files in a script or a notebook."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import yaml
from pyarrow import parquet

from gradmm.config.loading import recipe_of
from gradmm.data.shape import shape_of
from gradmm.deployments.new_recipe import first_token_of, recipe_name, recipe_text
from gradmm.deployments.serving.local_run import for_the_owner_only, run_recipe_here
from gradmm.errors import InputError
from gradmm.outputs.record import RunRecord
from gradmm.outputs.release import TRAIN_FILE
from gradmm.privacy.guarantee import Guarantee
from gradmm.storage.artifacts import Root, publish
from gradmm.storage.location import Location, location, read_bytes

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Distillation:
    """A finished run.

    Attributes:
        folder: of the run, with its record, its report and its release.
    """

    record: RunRecord
    folder: Location

    @property
    def texts(self) -> pd.DataFrame:
        """The synthetic texts: `text`, `label` (the likeliest class) and `p_<class>` (its probability)."""
        return pd.read_parquet(io.BytesIO(read_bytes(self.release / TRAIN_FILE)))

    @property
    def release(self) -> Location:
        """The folder that may be published if there is a guarantee. `datasets.load_dataset` reads it."""
        return self.folder / "release"

    @property
    def report(self) -> Location:
        """The private report, an HTML file."""
        return self.folder / "report.html"

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the release, composed with all others under the root that count the same unit."""
        return self.record.guarantee


def distil(
    data: pd.DataFrame | datasets.Dataset | str | Path,
    *,
    model: str | Path,
    epsilon: float | None,
    text: str | int | None = None,
    label: str | int | None = None,
    name: str = "data",
    root: str | Path = "gradmm-root",
    instructions: Mapping[Any, str] | None = None,
    settings: Iterable[str] = (),
    quiet: bool = False,
) -> Distillation:
    """Distil labelled texts into synthetic ones: `gradmm init` and `gradmm run` in one call.

    The root's caches and ledger are those of the command: a release is charged once, whoever repeats the call.

    The names of the classes, the number of rows (to two digits), the typical length of a text (coarsely) and
    whether letters outside ASCII are common are read off the data, as by `gradmm init`. They are in the release,
    and its guarantee treats them as public. Set those that must stay secret by `settings`, before the first call.

    Args:
        data: A frame or data set, or the path of a file or folder that `gradmm init` reads. A frame is written to
            `<root>/frames`, where only you can read it.
        model: Causal language model: a local folder or a hub id.
        epsilon: Epsilon of the guarantee. None: no guarantee.
        text: Column of the texts. Default: detected.
        label: Column of the labels. Default: detected.
        name: Name of the recipe and, for a frame, of the ledger that counts the releases from it.
        root: Folder, or URL in an object store, that holds stages, runs and ledgers.
        instructions: For classes by name, what the model goes on from. Default: a plain sentence for each.
        settings: Changes to the recipe, as for `--set`: "generation.per_class=100".
        quiet: Log warnings only.

    Raises:
        InputError: for a name, data, columns or settings that cannot be used.
        BudgetExhausted: if the release would exceed the privacy budget of the data.
        ValueError: for a root that is no path, and for a URL that cannot be used.
        TypeError: for a model that is no path.
    """
    # Text tells a URL with one slash, as `Path` makes of it, from a folder.
    place, model = location(str(root) if isinstance(root, Path) else root), os.fspath(model)
    if recipe_name(name) != name:
        raise InputError(f"{name!r} is not a valid name", "name", f"use {recipe_name(name)!r}")
    if isinstance(settings, str):
        raise InputError("is a text", "settings", f"give a list of them: [{settings!r}]")
    with for_the_owner_only():
        Root(path=place).prepare()
        with _as_file(data, name, place) as source:
            text, label = (None if column is None else str(column) for column in (text, label))
            values = yaml.safe_load(recipe_text(shape_of(source, text, label), model, first_token_of(model)))
            values["name"] = name
            values["privacy"]["epsilon"] = epsilon
            if not isinstance(data, str | Path):
                values["privacy"]["ledger"] = name
            _instruct(values["classes"], instructions or {})
            recipe = recipe_of(values, settings, where="distil")
            record = run_recipe_here(recipe, place, quiet=quiet)
    return Distillation(record, place / "runs" / record.run_id)


@contextmanager
def _as_file(data: Any, name: str, root: Location) -> Iterator[str]:
    """Write a frame or data set to a file named by its content, for the stages to read; delete it after an error.

    Raises:
        InputError: for data of another kind, repeated columns, or a root in an object store.
    """
    if isinstance(data, str | Path):
        yield str(data)
        return
    if not isinstance(root, Path):
        fix = "give a local folder, or a file of data"
        raise InputError("a frame cannot be kept in an object store", "root", fix)
    try:
        table = pa.Table.from_pandas(_frame(data), preserve_index=False)
        features = getattr(data, "features", None)  # of a data set: they name the classes
        names = features.arrow_schema.metadata if features else None
        stream = io.BytesIO()
        parquet.write_table(table.replace_schema_metadata({**table.schema.metadata, **(names or {})}), stream)
    except pa.ArrowException as error:  # quotes a value, and then names the column
        named = re.fullmatch("Conversion failed for column (.*) with type .*", str(error.args[-1]))
        where = named[1] if named else "data"
        fix = "convert the column to one type"
        raise InputError("values of several types, or of one that Parquet does not have", where, fix) from None
    except (UnicodeEncodeError, TypeError):  # half of a character; a sparse column
        fix = "convert its columns to plain ones, and texts to valid Unicode"
        raise InputError("has values that Parquet cannot hold", "data", fix) from None
    content = stream.getvalue()
    file = root / "frames" / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    is_new = not file.exists()
    publish(file, content)
    try:
        yield str(file)
    except BaseException:
        if is_new:
            file.unlink()
        raise


def _frame(data: Any) -> pd.DataFrame:
    splits: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    if any(hasattr(split, "to_pandas") for split in splits.values()):
        raise InputError(f"a data set of the splits {', '.join(splits)}", "data", "give one, as data['train']")
    if isinstance(data, pd.DataFrame):
        frame = data
    elif to_pandas := getattr(data, "to_pandas", None):
        frame = to_pandas()
    else:
        fix = "give a frame, a data set, or the path of a file or folder"
        raise InputError(f"{type(data).__name__} is no table", "data", fix)
    if twice := [str(column) for column in frame.columns[frame.columns.duplicated()]]:
        raise InputError(f"several columns are named {twice[0]!r}", "data", "rename or drop all but one")
    return frame


def _instruct(classes: list[dict[str, Any]], instructions: Mapping[Any, str]) -> None:
    by_name = {each["name"]: each for each in classes}
    for name, instruction in instructions.items():
        if str(name) not in by_name:
            among = ", ".join(map(repr, by_name))
            raise InputError(f"no class {str(name)!r} among {among}", "instructions", "give names of classes")
        by_name[str(name)]["instruction"] = instruction
