from __future__ import annotations

import mmap
import subprocess
import sys
import time

import pytest

from gradmm.evaluation.peak_memory import SAMPLE_SECONDS, peak_memory

MIB = 2**20


def test_peak_covers_only_the_active_context() -> None:
    # New pages, because malloc may reuse freed pages that are still resident.
    with peak_memory() as before, mmap.mmap(-1, 80 * MIB) as pages:
        pages.write(b"x" * len(pages))
        time.sleep(20 * SAMPLE_SECONDS)
    with peak_memory() as after:
        pass
    assert before.process - after.process > 60 * MIB


def test_memory_of_child_processes_is_included_on_request() -> None:
    code = f"import time; held = bytearray({200 * MIB}); print(len(held), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with peak_memory() as alone:
            pass
        with peak_memory(children=True) as both:
            pass
        process.kill()
    assert both.process - alone.process > 190 * MIB


def test_peak_is_measured_after_an_error_too() -> None:
    with pytest.raises(KeyError), peak_memory() as peak:
        raise KeyError
    assert peak.process > 0
