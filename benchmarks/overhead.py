"""Overhead of a run: starting, Prefect, and a run in which every stage is cached.

    python -m benchmarks.overhead demo
    python -m benchmarks.overhead sst2 --set data.path=... --set model.name=... --json overhead.json

Each run is a `gradmm run` in a fresh process, timed from outside; its run.json has the times of the flow and of
the stages. The demo's corpus and model are built beforehand. The fastest of repeated runs counts. CPU time, of a
run and its server together, is reported beside elapsed time, as other load on the machine affects it less.
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

from gradmm.demo.material import build_demo
from gradmm.outputs.record import RunRecord

#: A job of ten minutes, for the share of the overhead.
JOB_SECONDS = 600

#: A line of `-X importtime`: microseconds of the module, cumulative microseconds, indentation, name.
IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)")


@dataclass(frozen=True)
class TimedRun:
    """Seconds of a run: elapsed and CPU time of its process tree, and its flow and stages by its record."""

    process: float
    cpu: float
    flow: float
    stages: float
    cached: bool

    @property
    def overhead(self) -> float:
        """Seconds outside of the stages."""
        return self.process - self.stages


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of a run, and of a cached one")
    parser.add_argument("recipe", help="as `gradmm run` takes it")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--repeats", type=int, default=3, help="cached runs and small commands")
    parser.add_argument("--packages", type=int, default=10, help="number of imported packages to list")
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
    print(f"  {'':14} {'process':>8} {'CPU':>10} {'flow':>8} {'stages':>8} {'overhead':>12}")
    for name, run in {"fresh root": first, "all cached": cached}.items():
        print(
            f"  {name:14} {run.process:8.2f} {run.cpu:10.2f} {run.flow:8.2f} "
            f"{run.stages:8.2f} {run.overhead:12.2f}"
        )
    of_a_job = first.overhead / (first.overhead + JOB_SECONDS)
    print(
        f"  overhead: {first.overhead / first.process:.1%} of this run, "
        f"{of_a_job:.1%} of one with {JOB_SECONDS} s of stages"
    )
    print(f"  a cached run takes {cached.process / first.process:.1%} of a fresh one")
    for words, value in small.items():
        print(f"  gradmm {words.split()[0]:10} {value:8.2f}")
    print("imports of the cached run: seconds, including packages first imported by it")
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
    """Run a recipe, and read the record that it added to the root."""
    before = set(root.glob("runs/*/run.json"))
    cpu = _child_cpu_seconds()
    process = seconds(command)
    cpu = _child_cpu_seconds() - cpu
    (added,) = set(root.glob("runs/*/run.json")) - before
    record = RunRecord.model_validate_json(added.read_text())
    stages = sum(stage.seconds for stage in record.stages)
    return TimedRun(process, cpu, record.seconds, stages, all(stage.cached for stage in record.stages))


def seconds(command: Sequence[str]) -> float:
    """Time one `gradmm` command in a fresh process."""
    started = time.perf_counter()
    _gradmm(command)
    return time.perf_counter() - started


def _child_cpu_seconds() -> float:
    """CPU time of all finished descendants."""
    children = os.times()
    return children.children_user + children.children_system


def import_seconds(command: Sequence[str]) -> dict[str, float]:
    """Measure the import time of each top-level package, largest first. Shared imports count for the first one."""
    found: dict[str, float] = {}
    for package, value in outermost(_gradmm(command, "-X", "importtime").splitlines()):
        found[package] = found.get(package, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def outermost(lines: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield packages and their seconds, once for each import from outside of the package.

    A module is listed after its imports, which are indented one step more. Read from the end, every module follows
    its importer.
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
    """Run a command and return its stderr."""
    finished = subprocess.run(
        [sys.executable, *python, "-m", "gradmm.deployments.cli.main", *command], capture_output=True, text=True
    )
    if finished.returncode:
        sys.exit(f"gradmm {' '.join(command)} failed: {finished.stderr.strip()}")
    return finished.stderr


if __name__ == "__main__":
    main()
