from __future__ import annotations

import pytest
import torch

from gradmm.generation.parts_that_fit import in_parts_that_fit


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
