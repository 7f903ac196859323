"""Where the command `gradmm` starts."""

from __future__ import annotations

import signal


def main() -> int:
    """Import the commands and run one.

    Ctrl-C during the imports, when nothing has begun, ends the process without a word; `cli.main` takes over from
    there.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gradmm.deployments.cli.main import main

    return main()
