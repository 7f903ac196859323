"""A run in a process of its own, which has a fault at a place that is chosen beforehand.

The place is an event: a file opened for writing, renamed, removed or synced, or a folder made, under the root.
They are heard by an audit hook and counted, so that what happens where does not depend on how fast the machine is.
Processes are forked from one that has imported everything (multiprocessing's fork server): a run takes a second.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)

import gradmm.flows.distil
import gradmm.privacy.ledger
from gradmm.deployments.cli.main import main
from gradmm.target import checkpoint
from gradmm.target.target_gradient import TargetSums
from tests.faults.fault import Fault, happen

#: What a run imports late: every process would import it again.
IMPORTED_BEFORE_FORKING = [
    "datasets",
    "prefect.engine",
    "prefect.flow_engine",
    "prefect.task_engine",
    "pyarrow.acero",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.phi.modeling_phi",
    "gradmm.deployments.serving.prefect_server",
    "gradmm.deployments.cli.summary",
    "gradmm.flows.ui.plots",
    "gradmm.evaluation.finetune_eval",
    "gradmm.generation.generation",
    "gradmm.filters.label_filter",
    "gradmm.filters.loss_selection",
    "gradmm.audits.memorisation",
    "gradmm.audits.mia_audit",
    "gradmm.tasks.runtime.finetuning",
    "gradmm.target.matched_target",
    __name__,
]

#: What stands for names that differ from run to run.
PATTERNS = (
    (re.compile(r"[0-9a-f]{32}"), "*"),
    (re.compile(r"\d{8}T\d{6}Z-tiny(-\d+)?"), "RUN"),
    (re.compile(r"(\.[^/]+)\.[a-z0-9_]{8}\.tmp"), r"\1.TEMPORARY"),
)

#: Audit events with paths, and which of their arguments are these.
EVENTS = {
    "open": (0,),
    "os.fsync": (0,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
}

LIMIT_SECONDS = 240


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status (negative: of the signal that killed it), and what it said."""

    status: int
    said: str
    #: Labels of the events there were, and `draw` for each drawing of the target's noise.
    events: tuple[str, ...]

    @property
    def complaint(self) -> str:
        """The one line that it ended with.

        Raises:
            AssertionError: if it ended otherwise.
        """
        lines = [line for line in self.said.splitlines() if line.startswith("gradmm: ")]
        assert self.status == 2, (self.status, self.said)
        assert len(lines) == 1, self.said
        return lines[0]


@dataclass(frozen=True)
class Runner:
    """Runs one recipe's file, in one process after the other.

    `api` is None for runs that start a server of their own, whose records are in `home`. `clock` is by how many
    seconds theirs is ahead.
    """

    recipe: Path
    log: Path
    api: str | None
    home: Path | None = None
    clock: float = 0.0

    def start(self, root: Path, fault: Fault | None = None, *arguments: str) -> Running:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_BEFORE_FORKING)
        log = self.log / f"{len(list(self.log.iterdir())):04}"
        log.mkdir()
        words = ["run", str(self.recipe), "--root", str(root), *arguments]
        told = {"fault": fault, "log": log, "api": self.api, "home": self.home, "clock": self.clock}
        process = context.Process(target=_run, args=(words, root), kwargs=told)
        process.start()
        return Running(process, log)

    def __call__(self, root: Path, fault: Fault | None = None, *arguments: str) -> Ended:
        return self.start(root, fault, *arguments).end()


@dataclass(frozen=True)
class Running:
    process: BaseProcess
    log: Path

    def end(self) -> Ended:
        self.process.join(LIMIT_SECONDS)
        said = (self.log / "said").read_text()
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"it hangs: {said}")
        return Ended(self.process.exitcode, said, tuple((self.log / "events").read_text().splitlines()))


def label_of(event: str, path: Path) -> str:
    """The event by a name that it has in every run; `path` is relative to the root."""
    name = path.as_posix()
    for pattern, stands_for in PATTERNS:
        name = pattern.sub(stands_for, name)
    return f"{event.removeprefix('os.')} {name}"


def _run(
    words: list[str],
    root: Path,
    fault: Fault | None,
    log: Path,
    api: str | None,
    home: Path | None,
    clock: float,
) -> None:
    """In the new process: the command, to its end or to its fault."""
    said = os.open(log / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    checkpoint.SECONDS_BETWEEN_WRITES = 0.0  # at every batch
    if home:
        os.environ |= {"PREFECT_HOME": str(home)}
    _set_clock(clock)
    happened = os.open(log / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(label: str) -> None:
        os.write(happened, f"{label}\n".encode())

    _announce(note)
    sys.addaudithook(_hook(root.resolve(), fault, note))
    of_prefect: dict[Any, Any] = {PREFECT_API_URL: api, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    if fault and fault.how == "no server":
        of_prefect[PREFECT_CLIENT_MAX_RETRIES] = 0
    with _servers_ended(), temporary_settings(of_prefect):
        status = main(words)
    sys.exit(status)


@contextmanager
def _servers_ended() -> Iterator[None]:
    """Nothing that runs at Python's end does so in a process of multiprocessing."""
    try:
        yield
    finally:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _set_clock(seconds: float) -> None:
    """As far as gradmm looks at it."""

    class Moved(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + timedelta(seconds=seconds)

    real = time.time
    time.time = lambda: real() + seconds
    for module in (gradmm.flows.distil, gradmm.privacy.ledger):
        setattr(module, "datetime", Moved)  # noqa: B010


def _announce(note: Callable[[str], None]) -> None:
    """Makes events of what raises none: syncing a file, and drawing the target's noise."""
    fsync, release = os.fsync, TargetSums.release

    def heard_fsync(descriptor: int) -> None:
        sys.audit("os.fsync", descriptor)
        fsync(descriptor)

    def heard_release(self: TargetSums, mechanism: Any) -> Any:
        if self.text_tokens:  # not the audit's canaries
            note("draw")
        return release(self, mechanism)

    os.fsync = heard_fsync
    TargetSums.release = heard_release


def _hook(root: Path, fault: Fault | None, note: Callable[[str], None]) -> Callable[[str, tuple], None]:
    left, begun, inside = fault.passed if fault else 0, False, False

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left, begun, inside
        if inside or event not in EVENTS or (event == "open" and not _writes(*arguments)):
            return
        inside = True  # what is done here raises events too
        try:
            paths = [_path(arguments[number]) for number in EVENTS[event]]
            if not all(path and path.is_relative_to(root) for path in paths):
                return
            place = paths[-1]
            assert place
            label = label_of(event, place.relative_to(root))
            note(label)
            if fault and (begun or fault.label in (None, label)):
                begun, left = begun or not left, left - 1
                if begun:
                    happen(fault.how, event, place, root, first=left == -1)
        finally:
            inside = False

    return hook


def _writes(_: Any, mode: Any, flags: int) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _path(argument: Any) -> Path | None:
    """A path, or that of an open file."""
    if isinstance(argument, int):
        try:
            return Path(os.readlink(f"/proc/self/fd/{argument}"))
        except OSError:
            return None
    return Path(os.fsdecode(argument)).absolute()
