"""Timing of several ways to do the same work, per example, in one run."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Way:
    """One way, with `examples` per run. `warm_up` replaces a first run that would take long."""

    run: Callable[[], Any]
    examples: int
    warm_up: Callable[[], Any] | None = None


def seconds_per_example(ways: dict[str, Way], repeats: int) -> dict[str, float]:
    """Measure the median time of each way after a warm-up."""
    for way in ways.values():
        (way.warm_up or way.run)()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):  # in turns, so that other load slows all alike
        for name, way in ways.items():
            _wait()
            started = time.perf_counter()
            way.run()
            _wait()
            seconds[name].append((time.perf_counter() - started) / way.examples)
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(title: str, seconds: dict[str, float], against: str, path: Path | None, **facts: Any) -> None:
    """Print milliseconds per example and speed-ups over one of the ways; write JSON to `path`."""
    print(f"{title}; {facts}")
    for name, value in seconds.items():
        print(f"  {name:46} {1000 * value:10.2f} ms per example {seconds[against] / value:8.1f} x")
    if path:
        found = {"title": title, "seconds_per_example": seconds, "device": device_name(), **facts}
        path.write_text(json.dumps(found, indent=2) + "\n")


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model folder or hub id")
    parser.add_argument("--tokens", type=int, default=25, help="of each text")
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
