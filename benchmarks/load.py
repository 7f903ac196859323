"""Load: memory, open files and disk of many rows, many texts and many runs.

    python -m benchmarks.load target --rows 100000 1000000      # rows through the target's stage
    python -m benchmarks.load generation --texts 1000 10000     # texts through generation and all filters
    python -m benchmarks.load runs --runs 100                   # one after another in one process, all cached

The model is minimal, with random weights, and the settings are the cheapest possible, so that only the handling of
rows, texts and runs grows. Each line of `target` and `generation` is measured in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pandas as pd
import psutil
import yaml

from gradmm.demo.grammar import private_rows
from gradmm.evaluation.peak_memory import peak_memory

MIB = 2**20
HELD_OUT = {"validation": 1000, "test": 1000}  # rows
#: Distinct sentences of the grammar; each row is one of them with a number.
SENTENCES = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description="Load: memory, open files and disk")
    parts = parser.add_subparsers(required=True)
    target = parts.add_parser("target", help="rows through the target's stage")
    target.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    target.set_defaults(part=_target)
    generation = parts.add_parser("generation", help="synthetic texts through all stages")
    generation.add_argument("--texts", type=int, nargs="+", default=[1000, 10_000])
    generation.add_argument("--shard-size", type=int, default=250)
    generation.set_defaults(part=_generation)
    runs = parts.add_parser("runs", help="cached runs in one process")
    runs.add_argument("--runs", type=int, default=100)
    runs.set_defaults(part=_runs)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        options.part(options, Path(folder))


def write_model(folder: Path) -> None:
    from benchmarks.gpu_generation import save_model

    shape = {"vocabulary": 2048, "hidden": 8, "heads": 1, "layers": 1}
    save_model(argparse.Namespace(**shape), folder)


def write_data(folder: Path, rows: int) -> Path:
    """Write train rows of two classes, at most a hundred bytes each."""
    folder.mkdir()
    written = private_rows(SENTENCES, random.Random(0))
    for split, count in {"train": rows, **HELD_OUT}.items():
        texts = [f"{written[row % SENTENCES][0]} {split} {row}" for row in range(count)]
        labels = [written[row % SENTENCES][1] for row in range(count)]
        pd.DataFrame({"text": texts, "label": labels}).to_parquet(folder / f"{split}.parquet")
    return folder


def recipe_values(folder: Path, data: Path, texts: int, shard_size: int) -> dict[str, object]:
    """The cheapest recipe that runs every stage."""
    classes = [(0, "negative", " bad", "An unhappy customer wrote:\n"), (1, "positive", " good", "A happy one:\n")]
    names = ("label", "name", "verbaliser", "instruction")
    return {
        "name": "load",
        "data": {"path": str(data), "validation_split": "validation"},
        "classes": [dict(zip(names, each, strict=True)) for each in classes],
        "model": {"name": str(folder / "model")},
        "target_gradient": {
            "space": "label-rows",
            "centred": False,
            "probe_share": 0.5,
            "token_share": 0.0,
            "batch_size": 1000,
        },
        "generation": {
            "method": "search",
            "loss": "cosine",
            "per_class": texts // 2,
            "shard_size": shard_size,
            "text_tokens": 8,
            "search": {"draws": 1, "rounds": 0},
        },
        "label_filter": {
            "enabled": True,
            "exemplars": [{"text": "Good.", "label": 1}, {"text": "Bad.", "label": 0}],
        },
        "loss_selection": {"per_class": texts // 2},
        "category_balance": {"floor": 1},
        "finetune_eval": {"steps": 2, "learning_rates": [1e-4], "seeds": [0], "max_validation_rows": 50},
        "mia_audit": {"runs": 1, "threshold_records": 10, "test_records": 10},
    }


def in_a_fresh_process(work: Callable[..., str], *arguments: object) -> str:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# --- Rows ---------------------------------------------------------------------------------------------------


def _target(options: argparse.Namespace, folder: Path) -> None:
    for rows in options.rows:
        data = write_data(folder / f"rows-{rows}", rows)
        print(in_a_fresh_process(measure_target, folder, data, rows), flush=True)


def measure_target(folder: Path, data: Path, rows: int) -> str:
    """Measure the fingerprint of the data, and the stage, without Prefect."""
    from gradmm.config.loading import validate_recipe
    from gradmm.flows.pipeline import stage_runs
    from gradmm.lm.prompt_template import PromptTemplate
    from gradmm.storage.artifacts import Root
    from gradmm.tasks.runtime.inputs import dataset_fingerprint, model_fingerprint
    from gradmm.tasks.target_gradient import target_gradient

    recipe = validate_recipe(recipe_values(folder, data, 2, 1), "load")
    place = folder / f"root-{rows}"
    root = Root(path=place)
    root.prepare()
    context = stage_runs(recipe, recipe, root).context
    model, before = model_fingerprint.fn(recipe.model), psutil.Process().memory_info().rss
    began = time.perf_counter()
    with peak_memory() as reading:
        train = dataset_fingerprint.fn(context).train
    with peak_memory() as summing:
        inputs = {
            "train": train,
            "space": None,
            "model": model,
            "prompt_template": PromptTemplate.of(recipe),
            "settings": recipe.target_gradient,
            "clipping_norm": 1.0,
            "mechanism": None,
        }
        target_gradient.fn(context.for_stage("target_gradient", inputs), **inputs)
    return (
        f"{train.rows:10,} rows  {time.perf_counter() - began:7.1f} s   before {before / MIB:6,.0f} MiB   "
        f"peak while reading {reading.process / MIB:6,.0f} MiB, while summing {summing.process / MIB:6,.0f} MiB   "
        f"{_disk(place)} on disk"
    )


# --- Texts --------------------------------------------------------------------------------------------------


def _generation(options: argparse.Namespace, folder: Path) -> None:
    data = write_data(folder / "data", 2000)
    for texts in options.texts:
        root, recipe = folder / f"root-{texts}", folder / f"{texts}.yaml"
        recipe.write_text(yaml.safe_dump(recipe_values(folder, data, texts, options.shard_size)))
        began = time.perf_counter()
        run_here(recipe, root)
        print(f"{texts:,} texts  {time.perf_counter() - began:.1f} s   {_disk(root)} on disk")
        (record,) = root.glob("runs/*/run.json")
        for stage in json.loads(record.read_text())["stages"]:
            print(
                f"  {stage['stage']:16} {stage['rows']:7,} rows  {stage['seconds']:7.1f} s   "
                f"peak {stage['peak_memory'] / MIB:6,.0f} MiB",
                flush=True,
            )


def run_here(recipe: Path, root: Path) -> None:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "gradmm.deployments.cli.main", "run", str(recipe), "--root", str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# --- Runs ---------------------------------------------------------------------------------------------------


def _runs(options: argparse.Namespace, folder: Path) -> None:
    data = write_data(folder / "data", 2000)
    recipe, root = folder / "load.yaml", folder / "root"
    recipe.write_text(yaml.safe_dump(recipe_values(folder, data, 40, 10)))
    os.environ["PREFECT_HOME"] = str(folder / "home")
    from gradmm.deployments.serving.local_run import local_run

    with local_run(root, verbose=False) as wait_for_server:
        from gradmm.config.loading import load_recipe
        from gradmm.flows.distil import distil

        wait_for_server()
        loaded = load_recipe(recipe)
        blocks = {name: getattr(loaded, name) for name in type(loaded).model_fields}
        for number in range(1, options.runs + 1):
            began = time.perf_counter()
            with redirect_stdout(StringIO()):
                distil(**blocks, root=root)
            if number in (1, 2, 5) or number % 10 == 0:
                print(f"run {number:4}  {time.perf_counter() - began:5.1f} s   {_usage(folder)}", flush=True)
    for place, size in Counter(_sizes(root)).most_common():
        print(f"  {place:10} {size / 1000:10,.0f} kB")


def _usage(folder: Path) -> str:
    """Memory, files and threads of this process and of Prefect's server, and bytes on disk."""
    process = psutil.Process()
    (server,) = (child for child in process.children() if "prefect" in child.cmdline())
    return (
        f"{process.memory_info().rss / MIB:6.0f} MiB, {process.num_fds()} files, {process.num_threads()} threads; "
        f"server {server.memory_info().rss / MIB:6.0f} MiB, {server.num_fds()} files; "
        f"root {_disk(folder / 'root')}, Prefect's home {_disk(folder / 'home')}"
    )


def _sizes(root: Path) -> dict[str, int]:
    """Count the bytes of each folder directly under a root."""
    sizes: Counter[str] = Counter()
    for file in root.rglob("*"):
        if file.is_file():
            sizes[file.relative_to(root).parts[0]] += file.stat().st_size
    return sizes


def _disk(folder: Path) -> str:
    return f"{sum(_sizes(folder).values()) / 1e6:.2f} MB"


if __name__ == "__main__":
    logging.getLogger("gradmm").setLevel(logging.WARNING)
    main()
