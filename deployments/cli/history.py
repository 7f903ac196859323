"""Finished runs: find, list and compare them.

run.json is read as plain values, not as a `RunRecord`: runs of older versions of gradmm, which had other settings,
can then be listed and compared too.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC
from typing import Any

from pydantic import AwareDatetime, BaseModel, ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradmm.deployments.cli.terminal import print_json, print_table
from gradmm.errors import InputError, printable
from gradmm.outputs.formatting import duration, leaves
from gradmm.storage.location import Location, location, reach, read_bytes

#: In place of a value that one of two runs lacks.
ABSENT = "–"

SHA256 = re.compile("[0-9a-f]{64}")

ARMS = ("before", "synthetic", "real")


class PastStage(BaseModel, frozen=True):
    """One stage in run.json."""

    stage: str
    path: Location
    sha256: str
    rows: int
    figures: dict[str, Any]
    cached: bool


class PastRun(BaseModel, frozen=True):
    """The fields of run.json that all versions of gradmm share, and its folder."""

    folder: Location
    run_id: str
    recipe: dict[str, Any]
    guarantee: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    started: AwareDatetime
    seconds: float
    versions: dict[str, str]
    stages: list[PastStage]

    @property
    def report(self) -> Location:
        """The report of a run, the tables of a study."""
        tables = self.folder / "tables.md"  # studies.record.TABLES, which takes seconds to import
        return tables if tables.is_file() else self.folder / "report.html"

    def figures(self, stage: str) -> dict[str, Any]:
        """Return the figures of a stage, empty if the run did not have it."""
        return next((s.figures for s in self.stages if s.stage == stage), {})

    def stage_file(self, stage: PastStage) -> Location:
        """Return a stage's Parquet: beside the run if the root was moved, else where it was written."""
        beside = self.folder.parent.parent / "stages" / stage.stage / stage.path.name
        return beside if beside.exists() else stage.path


@dataclass(frozen=True)
class Difference:
    """A value that differs between two runs, by its dotted name. `ABSENT` stands for a missing value."""

    group: str
    name: str
    first: Any
    second: Any


def past_runs(root: Location) -> tuple[list[PastRun], list[InputError]]:
    """Return the runs under a root, newest first, and an error for each folder that holds none."""
    reach(root)
    runs, faults = [], []
    folder = root / "runs"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if entry.is_dir():
            try:
                runs.append(_read(entry))
            except InputError as fault:
                faults.append(fault)
    return sorted(runs, key=lambda run: (run.started, run.run_id), reverse=True), faults


def find_run(name: str, root: Location) -> PastRun:
    """Find a run by its id under a root, or by its folder.

    Raises:
        InputError: if there is no such run, with the nearest id; or if its record is damaged.
    """
    for folder in (root / "runs" / name, *_as_location(name)):
        reach(folder)
        if folder.is_dir():
            return _read(folder)
    ids = [run.run_id for run in past_runs(root)[0]]
    if not ids:
        raise InputError(f"no run {name!r}, nor any other", str(root), "give the --root of the run")
    near = [i for i in ids if name and name in i] or difflib.get_close_matches(name, ids, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"the newest is {ids[0]!r}, `gradmm runs` lists all"
    raise InputError(f"no run {name!r}", str(root), fix)


def check_count(run: PastRun) -> None:
    """Check that the card of a run counts all releases that its root's ledgers have by now.

    Raises:
        InputError: if it states another number, so that its composed epsilon is not theirs.
    """
    # Imported here: lists of runs need neither.
    from gradmm.config.recipe import Recipe
    from gradmm.privacy.ledger import Ledger

    if not run.guarantee.get("safe"):
        return
    try:
        recipe = Recipe.model_validate(run.recipe)
    except ValidationError:  # of another version
        return
    root, stated = run.folder.parent.parent, run.guarantee.get("releases") or 0
    made = len(Ledger.of(root, recipe.ledger).stated_releases(recipe.privacy.unit_column))
    if stated != made:
        problem = (
            f"its card states {stated} release{'' if stated == 1 else 's'}, and the ledgers of {root} have {made}"
        )
        fix = "run its recipe again, which takes the stages from the cache, and publish that run"
        raise InputError(problem, str(run.folder / "release"), fix)


def _as_location(name: str) -> list[Location]:
    try:
        return [location(name)]
    except ValueError:
        return []


def differences(first: PastRun, second: PastRun) -> list[Difference]:
    """Compare two runs: possible causes of other results first, then the results. Times and paths are left out."""
    return [
        Difference(group, name, *values)
        for group, one, other in (
            ("settings", first.recipe, second.recipe),
            ("data", first.data, second.data),
            ("model", first.model, second.model),
            ("code", _code(first), _code(second)),
            ("libraries", first.versions, second.versions),
            ("guarantee", first.guarantee, second.guarantee),
            ("figures", _results(first), _results(second)),
        )
        for name, values in _unequal(one, other)
    ]


def print_runs(root: Location, as_json: bool = False) -> None:
    """Print a row for each run, or all of run.json as JSON. Folders without a run are reported on stderr."""
    runs, faults = past_runs(root)
    for fault in faults:
        print(f"gradmm: skipped {fault}", file=sys.stderr)
    if as_json:
        print_json(runs)
    elif not runs:
        print(printable(f"no runs under {root}"))
    else:
        print_table(_run_table(runs, root), _run_table(runs, root, narrow=True))


def _run_table(runs: list[PastRun], root: Location, narrow: bool = False) -> Table:
    """Build a row for each run. A narrow table leaves out the columns that the id repeats, and column lines."""
    look: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0, "show_edge": False} if narrow else {}
    table = Table(title=printable(f"runs under {root}"), title_justify="left", **look)
    table.add_column("run", no_wrap=True, min_width=max(len(run.run_id) for run in runs))
    for heading in () if narrow else ("recipe", "started (UTC)"):
        table.add_column(heading)
    for heading in ("time", "epsilon", "texts", *ARMS, "cached"):
        table.add_column(heading, justify="right")
    for run in runs:
        evaluation = run.figures("finetune_eval")
        cached = sum(stage.cached for stage in run.stages)
        name_and_start = (
            printable(str(run.recipe.get("name", ""))),
            f"{run.started.astimezone(UTC):%Y-%m-%d %H:%M}",
        )
        table.add_row(
            printable(run.run_id),
            *(() if narrow else name_and_start),
            duration(run.seconds),
            _epsilon(run.guarantee),
            str(run.figures("category_balance").get("kept", "")),
            *(_rate(evaluation.get(f"accuracy_{arm}")) for arm in ARMS),
            f"{cached} of {len(run.stages)}",
        )
    return table


def print_differences(first: PastRun, second: PastRun, as_json: bool = False) -> None:
    """Print a table of the differences, one section for each group; or a JSON list, without `ABSENT` values."""
    found = differences(first, second)
    if as_json:
        print_json([{k: v for k, v in asdict(each).items() if v is not ABSENT} for each in found])
        return
    if not found:
        both = printable(f"{first.run_id} and {second.run_id}")
        print(f"{both}: the same settings, data, model, code, libraries and figures")
        return
    table = Table(title="differences", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("name", printable(first.run_id), printable(second.run_id)):
        table.add_column(heading, overflow="fold")
    for before, each in zip([None, *found], found, strict=False):
        begins = before is None or before.group != each.group
        if begins and before:
            table.add_section()
        table.add_row(each.group if begins else "", *map(printable, (each.name, *_in_words(each))))
    print_table(table)


def _read(folder: Location) -> PastRun:
    file = folder / "run.json"
    try:
        content = json.loads(read_bytes(file))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return PastRun.model_validate(content | {"folder": folder})
    except FileNotFoundError as error:
        raise InputError("no run.json: not a finished run", str(folder), "run the recipe again") from error
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", str(file), "check its permissions") from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(f"not a run's record ({where} is wrong)", str(file), "restore or remove it") from error
    except ValueError as error:
        raise InputError("damaged: not a JSON object", str(file), "restore or remove it") from error


def _code(run: PastRun) -> dict[str, str]:
    """Return the code version in each stage's Parquet, for the files that can be read."""
    import pyarrow as pa  # only here: the list of runs needs neither
    import pyarrow.parquet as pq

    from gradmm.storage.artifacts import METADATA_KEY

    versions = {}
    for stage in run.stages:
        try:
            with run.stage_file(stage).open("rb") as stream:
                metadata = pq.read_schema(stream).metadata
            versions[stage.stage] = json.loads(metadata[METADATA_KEY])["code"]
        except (OSError, pa.ArrowException, TypeError, KeyError, ValueError):
            continue
    return versions


def _results(run: PastRun) -> dict[str, Any]:
    return {s.stage: {"rows": s.rows, "sha256": s.sha256} | s.figures for s in run.stages}


def _unequal(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    one, other = dict(leaves(first)), dict(leaves(second))
    names = list(dict.fromkeys([*one, *other]))
    blocks = list(dict.fromkeys(name.partition(".")[0] for name in names))
    # Sort by block, so that values of the second run alone are not all at the end.
    for name in sorted(names, key=lambda name: blocks.index(name.partition(".")[0])):
        values = one.get(name, ABSENT), other.get(name, ABSENT)
        if values[0] != values[1]:
            yield name, values


def _in_words(difference: Difference) -> tuple[str, str]:
    """Format both values, with enough digits to tell them apart."""
    words = ("", "")
    for digits in (4, 8, 17):
        words = _value(difference.first, digits), _value(difference.second, digits)
        if words[0] != words[1]:
            break
    return words


def _value(value: Any, digits: int) -> str:
    """Format a value as in YAML, but floats with `digits` significant digits, and digests cut."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, str):
        return value[:12] if SHA256.fullmatch(value) else value
    return json.dumps(value, ensure_ascii=False)


def _epsilon(guarantee: Mapping[str, Any]) -> str:
    epsilon = guarantee.get("epsilon")
    if not isinstance(epsilon, int | float):
        return "none"
    return f"{epsilon:g}" if guarantee.get("safe") else "UNSAFE"


def _rate(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else ""
