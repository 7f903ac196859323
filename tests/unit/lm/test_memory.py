from __future__ import annotations

import mmap
import subprocess
import sys
import time

import pytest
import torch

from gradmm.lm.memory import SAMPLE_SECONDS, in_parts_that_fit, peak_memory

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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
@pytest.mark.parametrize("fits", [1, 3, 4, 10, 11])
def test_work_that_does_not_fit_is_halved_until_it_does(error: Exception, fits: int) -> None:
    done: list[range] = []

    def work(numbers: range) -> list[int]:
        if len(numbers) > fits:
            raise error
        done.append(numbers)
        return list(numbers)

    results = in_parts_that_fit(work, range(5, 15))
    assert [number for part in results for number in part] == list(range(5, 15))
    assert max(map(len, done)) <= fits


def test_a_number_that_does_not_fit_and_any_other_error_are_raised() -> None:
    def too_large(numbers: range) -> None:
        raise MemoryError

    def broken(numbers: range) -> None:
        tried.append(numbers)
        raise RuntimeError("shapes do not match")

    tried: list[range] = []
    with pytest.raises(MemoryError):
        in_parts_that_fit(too_large, range(4))
    with pytest.raises(RuntimeError, match="shapes"):
        in_parts_that_fit(broken, range(4))
    assert tried == [range(4)]


def test_an_error_of_the_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    done = []

    def work(numbers: range) -> None:
        if len(numbers) > 1:
            raise caught.value
        done.append(numbers)

    in_parts_that_fit(work, range(2))
    assert len(done) == 2
