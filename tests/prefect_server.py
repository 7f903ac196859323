"""One Prefect server for all xdist workers of a session."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket

import httpx
import psutil
from filelock import FileLock

START_SECONDS = 120

#: It records runs, and neither schedules nor cancels any.
SETTINGS = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


@contextmanager
def shared_prefect_server(folder: Path) -> Iterator[str]:
    """Yield the address of the API of a server in `folder`: the first worker starts it, the last one stops it."""
    users = folder / "users"
    with FileLock(f"{folder}.lock"):
        users.mkdir(parents=True, exist_ok=True)
        (users / str(os.getpid())).touch()
        if not (folder / "address").exists():
            _start(folder)
        pid, api = (folder / "address").read_text().split()
    try:
        yield api
    finally:
        with FileLock(f"{folder}.lock"):
            (users / str(os.getpid())).unlink()
            if not any(psutil.pid_exists(int(user.name)) for user in users.iterdir()):
                (folder / "address").unlink()
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(int(pid)).terminate()


def _start(folder: Path) -> None:
    """Start a server and write its process id and address once it answers."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--no-ui"],
            env=os.environ | SETTINGS | {"PREFECT_HOME": str(folder), "PREFECT_API_URL": api},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not _answers(api):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError((folder / "log").read_text())
        time.sleep(0.1)
    process.returncode = 0  # the last worker ends it, not this one
    (folder / "address").write_text(f"{process.pid} {api}")


def _answers(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=2).is_success
    except httpx.TransportError:
        return False
