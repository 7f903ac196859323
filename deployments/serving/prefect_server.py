"""The Prefect server of a command: the configured one, or a local one that the command starts and stops."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO
from urllib.parse import urlsplit

import httpx
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    PREFECT_UI_URL,
    temporary_settings,
)

from gradmm.deployments.serving import server_process
from gradmm.errors import InputError, ServerGone
from gradmm.flows.runtime.stopping import raise_if_interrupted

LOOPBACK, DEFAULT_PORT = "127.0.0.1", 4200
START_SECONDS = 180

#: Leases of concurrency slots go to files: a lease in memory would hold its slot for ever after a restart.
SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
}

#: Lines after the message of a database's error, by SQLAlchemy.
FOOTNOTES = ("(Background on this error", "[SQL:", "[parameters:")

#: Prefect's setting for its own temporary server, which records runs but neither schedules nor cancels any.
ONLY_RECORDING = {"PREFECT__SERVER_EPHEMERAL": "1"}


@dataclass(frozen=True)
class Server:
    """A server at the address of its API, with its process if this command started it."""

    api: str
    #: Whether Prefect's own configuration names it.
    configured: bool = True
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] | None = None
    #: For the user, if it does not start.
    remedy: str = "fix that, or choose another --port"

    @property
    def ui(self) -> str:
        """The address of its web page."""
        return PREFECT_UI_URL.value() or self.api.removesuffix("/api")

    @property
    def answers(self) -> bool:
        """Whether a Prefect server answers; another service at this address does not count."""
        try:
            health = httpx.get(f"{self.api}/health", timeout=5)
            return health.status_code == 200 and health.json() is True
        except (httpx.HTTPError, ValueError):
            return False

    @property
    def has_ended(self) -> bool:
        """Whether its machine refuses connections. A busy server does not."""
        address = urlsplit(self.api)
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            with socket.create_connection((address.hostname, port), timeout=5):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            InputError: if its process ends first, or after `START_SECONDS`.
            KeyboardInterrupt: if Ctrl-C has arrived, also where an import has lost it.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            raise_if_interrupted()
            if self.answers:
                return
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                what = f"the Prefect server did not start ({self._last_words()})"
                raise InputError(what, self.api, self.remedy)
            time.sleep(0.2)

    def _last_words(self) -> str:
        if self.output is None:
            return "it does not answer"
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and not line.startswith(FOOTNOTES)]
        return said[-1] if said else "no output"


@contextmanager
def answering_server() -> Iterator[Server]:
    """Use the server that Prefect is configured for, or else the one that `gradmm serve` starts.

    Raises:
        InputError: if it does not answer.
    """
    server = Server(_configured_api())
    if not server.answers:
        fix = "start one with `gradmm serve`, or set PREFECT_API_URL"
        raise InputError("no Prefect server answers", server.api, fix)
    with _in_use(server):
        yield server


@contextmanager
def running_server(port: int | None = None) -> Iterator[Server]:
    """Use the server that answers, or start one for this machine, which is stopped at the end.

    A started server may not answer yet: call its `wait`.

    Args:
        port: of a local server; overrides Prefect's configuration.

    Raises:
        InputError: if none answers and none can be started there.
    """
    api = _configured_api(port)
    server = Server(api, configured=api == PREFECT_API_URL.value())
    if server.answers:
        with _in_use(server):
            yield server
        return
    address = urlsplit(server.api)
    if address.hostname not in (LOOPBACK, "localhost") or address.scheme != "http":
        fix = "start it, or unset PREFECT_API_URL for a local one"
        raise InputError("no Prefect server answers", server.api, fix)
    port = address.port or 80
    _check_port_is_free(port)
    with tempfile.TemporaryFile() as output:
        process = _start(server.api, output)
        server = Server(api, server.configured, process, output)
        try:
            with _in_use(server):
                yield server
        finally:
            _stop(process)


@contextmanager
def server_of_one_run() -> Iterator[Server | None]:
    """Start a server for this process alone; yield None if Prefect is configured for another, or for none.

    Prefect would start its own in the middle of a run, and import a server into the run's process first. This one
    starts while the caller imports. Like Prefect's own, it stores its records where later servers find them. It is
    stopped when Python ends, after the last logs and events have been sent.

    Raises:
        ServerGone: if the server stops answering.
    """
    configured = PREFECT_API_URL.value()
    if configured or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        if configured:
            _check_answer(configured)
        with _server_errors(configured or "PREFECT_API_URL"):
            yield None
        return
    with socket.socket() as any_port:
        any_port.bind((LOOPBACK, 0))
        port = any_port.getsockname()[1]
    api, output = f"http://{LOOPBACK}:{port}/api", tempfile.TemporaryFile()  # noqa: SIM115  (open until Python ends)
    process = _start(api, output, "--no-ui", settings=ONLY_RECORDING)
    atexit.register(_stop, process)
    server = Server(api, False, process, output, "fix that, or set PREFECT_API_URL to a running server")
    with _in_use(server), _server_errors(api):
        yield server


@contextmanager
def _server_errors(api: str) -> Iterator[None]:
    """Convert transport errors and refusals, which Prefect raises after its retries, to `ServerGone`."""
    try:
        yield
    except (httpx.TransportError, httpx.HTTPStatusError) as error:
        what = f"the Prefect server stopped answering ({error or type(error).__name__})"
        raise ServerGone(what, api, "finished stages and shards are kept, run again") from error


def _check_answer(api: str) -> None:
    """Raise an InputError if the configured server does not answer, or refuses."""
    from prefect import get_client

    _check_address(api)
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is not None:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"no Prefect server answers ({problem})", api, "start it, or unset PREFECT_API_URL")


def _check_address(api: str) -> None:
    try:
        httpx.URL(api)
        _ = urlsplit(api).port
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"not an address ({error})", api, "correct PREFECT_API_URL, or unset it") from error


def _start(
    api: str,
    output: IO[bytes],
    *options: str,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start a Prefect server process at an address of this machine, which ends when this process does."""
    port = str(urlsplit(api).port)
    return subprocess.Popen(
        [sys.executable, "-m", server_process.__name__, "--host", LOOPBACK, "--port", port, *options],
        env=SERVER_SETTINGS | os.environ | {"PREFECT_API_URL": api, **settings},
        stdin=subprocess.PIPE,  # never written to; see `server_process`
        stdout=output,
        stderr=subprocess.STDOUT,
        # A terminal sends Ctrl-C to all processes of a session's foreground: the server would end before its runs
        # have reported their end.
        start_new_session=True,
    )


@contextmanager
def _in_use(server: Server) -> Iterator[None]:
    """Configure a server for this process, all its threads, and its children."""
    # Imported here: it takes a second, in which a server can start.
    from prefect.context import refresh_global_settings_context

    os.environ["PREFECT_API_URL"] = server.api
    # Threads do not inherit temporary settings: Prefect would start a server for those of a process pool.
    refresh_global_settings_context()
    with temporary_settings({PREFECT_API_URL: server.api}):
        yield


def _configured_api(port: int | None = None) -> str:
    configured = None if port else PREFECT_API_URL.value()
    if configured:
        _check_address(configured)
    return configured.rstrip("/") if configured else f"http://{LOOPBACK}:{port or DEFAULT_PORT}/api"


def _check_port_is_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            what = f"no Prefect server answers on port {port}, and none can start there ({error})"
            raise InputError(what, "port", "choose another one") from error


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(server_process.STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
