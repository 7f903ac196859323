"""Runs that are over: which there are, and in what two of them differ.

They are read from their run.json as plain values and not as a `RunRecord`: older versions of gradmm had other
settings, and their runs are to be listed and compared too.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from pydantic import AwareDatetime, BaseModel, ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradmm_core.errors import InputError, printable
from gradmm_core.location import Location, location, reach, read_bytes

#: Columns of a table that is not printed on a terminal: lines stay whole, for `grep` and the like.
WIDE = 200

#: In place of a value that a run does not have.
ABSENT = "–"

SHA256 = re.compile("[0-9a-f]{64}")

ARMS = ("before", "synthetic", "real")


class PastStage(BaseModel, frozen=True):
    """What run.json says of a stage."""

    stage: str
    path: Location
    sha256: str
    rows: int
    figures: dict[str, Any]
    cached: bool


class PastRun(BaseModel, frozen=True):
    """What run.json says, as far as all versions of gradmm have it, and the folder that it lies in."""

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
        """Of a study, its tables."""
        tables = self.folder / "tables.md"  # study_record.TABLES, whose import takes seconds
        return tables if tables.is_file() else self.folder / "report.html"

    def figures(self, stage: str) -> dict[str, Any]:
        """A stage's figures; none of a stage that was not there."""
        return next((s.figures for s in self.stages if s.stage == stage), {})

    def stage_file(self, stage: PastStage) -> Location:
        """Where a stage's Parquet is: where it was written, or beside the run if the root was moved."""
        beside = self.folder.parent.parent / "stages" / stage.stage / stage.path.name
        return beside if beside.exists() else stage.path


@dataclass(frozen=True)
class Difference:
    """One value that two runs do not share, by its dotted name; `ABSENT` stands for one that a run has not."""

    group: str
    name: str
    first: Any
    second: Any


def _shown(text: str) -> Text:
    """Without markup, to which a `[red]` in a name would belong, and without what controls terminals."""
    return Text(printable(text))


def past_runs(root: Location) -> tuple[list[PastRun], list[InputError]]:
    """The runs under a root, newest first, and what is wrong with each folder there that holds none."""
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
    """A run by its id under a root, or by its folder.

    Raises:
        InputError: if there is none, with the one that may have been meant; or if it is damaged.
    """
    for folder in (root / "runs" / name, *_place(name)):
        reach(folder)
        if folder.is_dir():
            return _read(folder)
    runs, _ = past_runs(root)
    ids = [run.run_id for run in runs]
    if not ids:
        raise InputError(f"no run {name!r}, nor any other", str(root), "give the --root that runs were made with")
    near = [i for i in ids if name and name in i] or difflib.get_close_matches(name, ids, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"the newest is {ids[0]!r}, `gradmm runs` lists all"
    raise InputError(f"no run {name!r}", str(root), fix)


def _place(name: str) -> list[Location]:
    """What a name is as a place, if it can be one."""
    try:
        return [location(name)]
    except ValueError:
        return []


def differences(first: PastRun, second: PastRun) -> list[Difference]:
    """All that may explain other results, then the results. Times, and where files lie, are not looked at."""
    return [
        Difference(group, name, *values)
        for group, mine, yours in (
            ("settings", first.recipe, second.recipe),
            ("data", first.data, second.data),
            ("model", first.model, second.model),
            ("code", _code(first), _code(second)),
            ("libraries", first.versions, second.versions),
            ("guarantee", first.guarantee, second.guarantee),
            ("figures", _results(first), _results(second)),
        )
        for name, values in _unlike(mine, yours)
    ]


def print_runs(runs: list[PastRun], faults: list[InputError], root: Location) -> None:
    """A line for each run; what is no run is told on stderr."""
    for fault in faults:
        print(f"gradmm: skipped {fault}", file=sys.stderr)
    console = _console()
    if not runs:
        console.print(_shown(f"no runs under {root}"), soft_wrap=True)
        return
    table = _run_table(runs, root)
    if Console(width=10 * WIDE).measure(table).maximum > console.width:
        table = _run_table(runs, root, narrow=True)
    console.print(table)


def _run_table(runs: list[PastRun], root: Location, narrow: bool = False) -> Table:
    """A row for each run. A narrow table leaves out what a run's id says too, and the lines between columns."""
    look: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0, "show_edge": False} if narrow else {}
    table = Table(title=_shown(f"runs under {root}"), title_justify="left", **look)
    table.add_column("run", no_wrap=True, min_width=max(len(run.run_id) for run in runs))
    if not narrow:
        table.add_column("recipe")
        table.add_column("started (UTC)")
    for heading in ("took", "epsilon", "texts", *ARMS, "cached"):
        table.add_column(heading, justify="right")
    for run in runs:
        evaluation = run.figures("finetune_eval")
        cached = sum(stage.cached for stage in run.stages)
        name_and_time = (_shown(str(run.recipe.get("name", ""))), f"{run.started.astimezone(UTC):%Y-%m-%d %H:%M}")
        table.add_row(
            _shown(run.run_id),
            *(() if narrow else name_and_time),
            _duration(run.seconds),
            _epsilon(run.guarantee),
            str(run.figures("category_balance").get("kept", "")),
            *(_rate(evaluation.get(f"accuracy_{arm}")) for arm in ARMS),
            f"{cached} of {len(run.stages)}",
        )
    return table


def print_differences(first: PastRun, second: PastRun) -> None:
    """A table of what differs, one section for each group."""
    found = differences(first, second)
    console = _console()
    if not found:
        both = f"{first.run_id} and {second.run_id}"
        console.print(
            _shown(f"{both}: the same settings, data, model, code, libraries and figures"), soft_wrap=True
        )
        return
    table = Table(title="what differs", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("name", overflow="fold")
    for run in (first, second):
        table.add_column(_shown(run.run_id), overflow="fold")
    for i, difference in enumerate(found):
        begins = i == 0 or found[i - 1].group != difference.group
        if begins and i:
            table.add_section()
        group = difference.group if begins else ""
        table.add_row(group, *(_shown(cell) for cell in (difference.name, *_as_words(difference))))
    console.print(table)


def _read(folder: Location) -> PastRun:
    file = folder / "run.json"
    try:
        content = json.loads(read_bytes(file))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return PastRun.model_validate(content | {"folder": folder})
    except FileNotFoundError as error:
        raise InputError("no run.json: not finished, or no run", str(folder), "run the recipe again") from error
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", str(file), "look at its permissions") from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(f"is no run's record ({where} is wrong)", str(file), "restore or remove it") from error
    except ValueError as error:
        raise InputError("is damaged: not JSON", str(file), "restore or remove it") from error


def _code(run: PastRun) -> dict[str, str]:
    """The version of the code behind each stage's Parquet, where that is still there."""
    import pyarrow as pa  # late: listing runs needs neither
    import pyarrow.parquet as pq

    from gradmm_core.artifacts import METADATA_KEY

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


def _unlike(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    mine, yours = dict(_leaves(first)), dict(_leaves(second))
    blocks = list(dict.fromkeys(name.partition(".")[0] for name in [*mine, *yours]))
    # What only the second run has stands with the rest of its block, not at the end.
    for name in sorted(dict.fromkeys([*mine, *yours]), key=lambda name: blocks.index(name.partition(".")[0])):
        values = mine.get(name, ABSENT), yours.get(name, ABSENT)
        if values[0] != values[1]:
            yield name, values


def _leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Single values by their dotted names; list items by their number, as `--set` takes them."""
    if isinstance(values, Mapping) and values:
        items = values.items()
    elif isinstance(values, list) and values:
        items = enumerate(values)
    else:
        yield name, values
        return
    for key, value in items:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _as_words(difference: Difference) -> tuple[str, str]:
    """Both values, with as many digits as it takes to tell them apart."""
    words = ("", "")
    for digits in (4, 8, 17):
        words = _in_words(difference.first, digits), _in_words(difference.second, digits)
        if words[0] != words[1]:
            break
    return words


def _in_words(value: Any, digits: int) -> str:
    """As YAML has it, but for floats, which get so many significant digits, and digests, which are cut."""
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


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDE)
