"""Runs of one private recipe in one process: a whole one, ones that fail where private records are read, and ones
that would have something from the hub.

    python -m tests.trust.planted_faults RECIPE.yaml ROOT BAD_DATA_FOLDER...

Each line of what it prints with `#` in front says which run begins, or with which status one ended.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

from gradmm.deployments.cli.main import main
from gradmm.deployments.serving.local_run import configure_prefect, for_the_owner_only
from tests.trust.network import begin

#: The stages that read private records, after their fingerprint has been taken.
READERS = ("target_gradient", "arm_eval", "mia_audit", "memorisation")

#: A hub id that a recipe names.
HUB = "acme/nothing"


def failing_reader(good_calls: int, kind: type[Exception]) -> Any:
    """Reads the splits; from some call on it fails with errors that quote records, one caused by another."""
    from gradmm.data.splits import load_splits

    calls = 0

    def read(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        splits = load_splits(*arguments)
        if calls <= good_calls:
            return splits
        try:
            raise KeyError(splits.train.texts[0])
        except KeyError as error:
            told = f"TextEncodeInput must be str, not {splits.train.texts[1]!r}"
            raise (kind("a bad row", "train", "mend it") if _is_input_error(kind) else kind(told)) from error

    read.cache_clear = lambda: None  # pyright: ignore[reportFunctionMemberAccess]
    return read


def _is_input_error(kind: type[Exception]) -> bool:
    from gradmm.errors import InputError

    return issubclass(kind, InputError)


def run(name: str, *arguments: str) -> None:
    command(name, "run", *arguments, "--verbose")


def command(name: str, *words: str) -> None:
    print(f"# {name} begins", flush=True)
    begin(name)
    try:
        status = main(words)
    except Exception:  # as Python itself would
        traceback.print_exc()
        status = 1
    print(f"# {name} ended with {status}", flush=True)


def runs(recipe: str, root: str, bad_data: list[str]) -> None:
    import gradmm.tasks.runtime.inputs
    from gradmm.errors import InputError

    whole = (recipe, "--root", root)
    run("whole", *whole)
    with mock.patch.object(gradmm.tasks.runtime.inputs, "_splits", failing_reader(0, TypeError)):
        run("dataset_fingerprint", *whole)
    with mock.patch.object(gradmm.tasks.runtime.inputs, "_splits", failing_reader(1, TypeError)):
        run("count_records", *whole)
    for stage in READERS:
        # A charged target cannot be forced, but be drawn again.
        again = ("--set", "privacy.redraw=true") if stage == "target_gradient" else ("--force", stage)
        with mock.patch.object(gradmm.tasks.runtime.inputs, "_splits", failing_reader(2, TypeError)):
            run(stage, *whole, *again)
    with mock.patch.object(gradmm.tasks.runtime.inputs, "_splits", failing_reader(2, InputError)):
        run("input_error", *whole, "--force", "memorisation")
    for folder in bad_data:
        run(f"data {Path(folder).name}", *whole, "--set", f"data.path={folder}")
    run("budget", *whole, "--set", "privacy.epsilon=9")
    command("audit", "audit", recipe)
    with mock.patch("huggingface_hub.utils._http.time"):  # it waits before it tries again
        run("hub model", *whole, "--set", f"model.name={HUB}")
        run("hub data", *whole, "--set", "data.path=null", "--set", f"data.hub={HUB}")


if __name__ == "__main__":
    configure_prefect(verbose=True)
    from gradmm.deployments.serving.prefect_server import server_of_one_run

    with for_the_owner_only(), server_of_one_run() as server:
        assert server is not None
        server.wait()
        runs(sys.argv[1], sys.argv[2], sys.argv[3:])
