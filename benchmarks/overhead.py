"""What a run costs beside its stages: starting, Prefect, and a run in which every stage is cached.

    python -m benchmarks.overhead demo
    python -m benchmarks.overhead sst2 --set data.path=... --set model.name=... --json overhead.json

Each run is a `gradmm run` in a process of its own, timed from outside; its run.json says what flow and stages
took. The demo's corpus and model are made beforehand: they are no stage. Of repeated runs the fastest counts.
Processor time, of a run and its server together, is told beside the clock's: a busy machine changes it less.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradmm_core.demo.material import build_demo
from gradmm_core.run_record import RunRecord

#: The job whose share is told: one of ten minutes.
JOB_SECONDS = 600

#: Of `-X importtime`: microseconds in the module itself, and with all that it imports; its depth in blanks.
IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)")


@dataclass(frozen=True)
class TimedRun:
    """A run's seconds: of its process from outside, and of its flow and all stages from its record.

    `processors` is what it and the processes that it started computed.
    """

    process: float
    processors: float
    flow: float
    stages: float
    cached: bool

    @property
    def overhead(self) -> float:
        return self.process - self.stages


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of a run, and of a cached one")
    parser.add_argument("recipe", help="as `gradmm run` takes it")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--repeats", type=int, default=3, help="of the cached run and of the small commands")
    parser.add_argument("--packages", type=int, default=10, help="how many imported ones to list")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.recipe == "demo":
            build_demo(root / "demo")
        command = ["run", options.recipe, "--root", folder]
        command += [word for change in options.overrides for word in ("--set", change)]
        first = timed_run(command, root)
        again = [timed_run(command, root) for _ in range(options.repeats)]
        assert not first.cached
        assert all(run.cached for run in again)
        cached = min(again, key=lambda run: run.process)
        small = {
            words: min(seconds(words.split()) for _ in range(options.repeats))
            for words in ("--help", "recipes", f"runs --root {folder}")
        }
        packages = import_seconds(command)
    print(f"{options.recipe}, {os.cpu_count()} cores; seconds")
    print(f"  {'':14} {'process':>8} {'computing':>10} {'flow':>8} {'stages':>8} {'beside them':>12}")
    for name, run in {"fresh root": first, "all cached": cached}.items():
        print(
            f"  {name:14} {run.process:8.2f} {run.processors:10.2f} {run.flow:8.2f} "
            f"{run.stages:8.2f} {run.overhead:12.2f}"
        )
    of_a_job = first.overhead / (first.overhead + JOB_SECONDS)
    print(
        f"  beside the stages: {first.overhead / first.process:.1%} of this run, "
        f"{of_a_job:.1%} of one with {JOB_SECONDS} s of stages"
    )
    print(f"  a cached run takes {cached.process / first.process:.1%} of a fresh one")
    for words, value in small.items():
        print(f"  gradmm {words.split()[0]:10} {value:8.2f}")
    print("imports of the cached run, seconds with all that each is the first to import")
    for name, value in list(packages.items())[: options.packages]:
        print(f"  {name:20} {value:8.2f}")
    if options.json:
        found = {
            "recipe": options.recipe,
            "overrides": options.overrides,
            "cores": os.cpu_count(),
            "fresh": vars(first),
            "cached": [vars(run) for run in again],
            "commands": {words.split()[0]: value for words, value in small.items()},
            "import_seconds": packages,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def timed_run(command: Sequence[str], root: Path) -> TimedRun:
    """Runs a recipe, and reads the record that it added to the root."""
    before = set(root.glob("runs/*/run.json"))
    computed = _processor_seconds()
    process = seconds(command)
    computed = _processor_seconds() - computed
    (added,) = set(root.glob("runs/*/run.json")) - before
    record = RunRecord.model_validate_json(added.read_text())
    stages = sum(stage.seconds for stage in record.stages)
    return TimedRun(process, computed, record.seconds, stages, all(stage.cached for stage in record.stages))


def seconds(command: Sequence[str]) -> float:
    """Of one `gradmm` command in a process of its own, by the parent's clock."""
    started = time.perf_counter()
    _gradmm(command)
    return time.perf_counter() - started


def _processor_seconds() -> float:
    """Of all processes that this one started and that have ended, and of those that they did."""
    children = os.times()
    return children.children_user + children.children_system


def import_seconds(command: Sequence[str]) -> dict[str, float]:
    """Of each top-level package in a command, the dearest first. What two of them import counts for the first."""
    found: dict[str, float] = {}
    for package, value in outermost(_gradmm(command, "-X", "importtime").splitlines()):
        found[package] = found.get(package, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def outermost(lines: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Packages and their seconds, once for each import that came from outside of the package.

    A module is listed after those that it imports, and those are a step further to the right: read from the end,
    every module comes after the one that imported it.
    """
    importers: list[str] = []
    for line in reversed(lines):
        if match := IMPORT.match(line):
            _, microseconds, blanks, module = match.groups()
            package, depth = module.partition(".")[0], len(blanks) // 2
            del importers[depth:]
            if package not in importers:
                yield package, int(microseconds) / 1e6
            importers.append(package)


def _gradmm(command: Sequence[str], *python: str) -> str:
    """What the command said on stderr."""
    finished = subprocess.run(
        [sys.executable, *python, "-m", "deployments.cli", *command], capture_output=True, text=True
    )
    if finished.returncode:
        sys.exit(f"gradmm {' '.join(command)} failed: {finished.stderr.strip()}")
    return finished.stderr


if __name__ == "__main__":
    main()
