"""A Prefect server that ends with the process that started it, even if that one is killed.

Run as `python -m gradmm.deployments.serving.server_process OPTION ...`, with the options of `prefect server start`
and a pipe as stdin, whose other end only the starting process holds. The operating system closes that end when the
process ends, however it ends. (Linux's PR_SET_PDEATHSIG would follow the thread that started the server, not the
process.)

Servers of several runs share Prefect's database. Only one at a time may set it up or bring it up to date: two that
started together on a new machine both made the same tables, and one of them ended.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import sys
import threading
import time

from filelock import FileLock

#: Time for the server to end by itself, after which it is ended by force.
STOP_SECONDS = 20


def _end_with_parent() -> None:
    os.read(0, 1)  # returns at the pipe's end: nothing is ever written
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os._exit(1)


def migrate_database() -> None:
    """Do what the server would do at its start, but one process at a time."""
    from prefect.context import refresh_global_settings_context
    from prefect.server.database import provide_database_interface
    from prefect.settings import PREFECT_HOME, PREFECT_SERVER_DATABASE_MIGRATE_ON_START

    if PREFECT_SERVER_DATABASE_MIGRATE_ON_START.value():
        PREFECT_HOME.value().mkdir(parents=True, exist_ok=True)
        with FileLock(PREFECT_HOME.value() / "gradmm-migration.lock"):
            asyncio.run(provide_database_interface().create_db())
        os.environ["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"
        refresh_global_settings_context()


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    migrate_database()
    sys.argv[1:1] = ["server", "start"]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
