"""Connections that processes try to make, each noted and refused unless it stays on this machine."""

from __future__ import annotations

import os
from pathlib import Path

#: Names the file of attempts, to all processes.
ATTEMPTS = "GRADMM_TEST_CONNECTIONS"

HERE = Path(__file__).parent


def refusing_network(attempts: Path) -> dict[str, str]:
    """The environment of a process that is refused the network, and all that it starts, but for this machine."""
    folders = (HERE.parents[1], HERE / "only_loopback")
    left_out = ("PREFECT_", "HF_", "CI", "DO_NOT_TRACK")  # by which libraries keep silent of themselves
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return environment | {"PYTHONPATH": os.pathsep.join(map(str, folders)), ATTEMPTS: str(attempts)}


def begin(part: str) -> None:
    """Notes, in a process with that environment, that what follows belongs to another part of its work."""
    with Path(os.environ[ATTEMPTS]).open("a") as attempts:
        attempts.write(f"# {part}\n")


def refused(attempts: Path) -> dict[str, list[str]]:
    """The attempts that were refused, by the part of the work; those before its first part are of ``."""
    found: dict[str, list[str]] = {"": []}
    for line in attempts.read_text().splitlines():
        if line.startswith("# "):
            found[line.removeprefix("# ")] = []
        elif line.startswith("refused "):
            found[next(reversed(found))].append(line.removeprefix("refused "))
    return found
