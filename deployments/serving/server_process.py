"""A Prefect server that ends with the process that started it, even if that one is killed.

Run as `python -m gradmm.deployments.serving.server_process OPTION ...`, with the options of `prefect server start`
and a pipe as stdin, whose other end only the starting process holds. The operating system closes that end when the
process ends, however it ends. (Linux's PR_SET_PDEATHSIG would follow the thread that started the server, not the
process.)
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

#: Time for the server to end by itself, after which it is ended by force.
STOP_SECONDS = 20


def _end_with_parent() -> None:
    os.read(0, 1)  # returns at the pipe's end: nothing is ever written
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[1:1] = ["server", "start"]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
