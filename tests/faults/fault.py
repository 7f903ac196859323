"""What happens to a run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

How = Literal["kill", "torn", "EROFS", "ENOSPC", "fill", "no server", "new server"]


@dataclass(frozen=True)
class Fault:
    """What happens at the event after `passed` others, of those with this label if one is given.

    `kill`: SIGKILL before the event; `torn`: half of a file is written, then SIGKILL. `EROFS`, `ENOSPC`: the
    operating system's error, at this event and at all later ones. `fill`: the root's disk has no room left.
    `no server`: the run's own Prefect server is killed; `new server`: and another one started in its place.
    """

    how: How
    label: str | None = None
    passed: int = 0


def happen(how: How, event: str, path: Path, root: Path, first: bool) -> None:
    """Makes it happen, for the first time or at a later event.

    Raises:
        OSError: where that is what happens.
    """
    match how:
        case "torn" | "kill":
            if how == "torn":
                _tear(event, path)
            os.kill(os.getpid(), signal.SIGKILL)
        case "EROFS" | "ENOSPC":
            if how == "EROFS" or event not in ("os.remove", "os.rmdir"):  # of a full disk one may remove files
                number = getattr(errno, how)
                raise OSError(number, os.strerror(number), str(path))
        case "fill" if first:
            disk = os.statvfs(root)
            with (root / "filler").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_frsize)
        case "no server" | "new server" if first:
            _lose_server(how == "new server")


def _tear(event: str, path: Path) -> None:
    """Leaves what a kill in the middle of writing does."""
    if event == "os.fsync" and path.is_file():
        content = path.read_bytes()
        last_line = content[:-1].rfind(b"\n") + 1 if path.suffix == ".jsonl" else 0
        os.truncate(path, (last_line + len(content)) // 2)
    elif event == "open" and (not path.exists() or path.parts[-3] == "results"):  # which Prefect writes in place
        path.write_bytes(b'{"torn')


def _lose_server(another: bool) -> None:
    (server, *workers) = psutil.Process().children(recursive=True)
    command, environment = server.cmdline(), server.environ()
    for process in (server, *workers):
        process.kill()
        process.wait()
    if another:
        stdin, _ = os.pipe()  # whose other end is open until the run ends, and with it the server
        subprocess.Popen(
            command, env=environment, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
