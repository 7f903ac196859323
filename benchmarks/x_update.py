"""One step of the X-update: the closed form per example, compared with the published procedure.

    python -m benchmarks.x_update --model ../shared/material/models/reviews-phi-9m

A step is the gradient of the augmented Lagrangian with respect to the texts' embeddings. Before the timing both
are compared on batches of one example, where they must agree.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.published import BATCH
from benchmarks.timing import Way, add_timing_arguments, report, seconds_per_example
from benchmarks.workload import Workload, ways_of_gradmm
from gradmm.generation.objectives import HeadMatching

RHO = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description="X-update by closed form and by double backward")
    add_timing_arguments(parser)
    options = parser.parse_args()
    plain = Workload.plain(options)
    ways = {"published": Way(plain_step(plain, BATCH), BATCH)} | ways_of_gradmm(options, closed_form_step)
    gap = largest_gap(plain, plain.texts(3))
    report(
        "X-update",
        seconds_per_example(ways, options.repeats),
        "published",
        options.json,
        tokens=options.tokens,
        vocabulary=len(plain.model.embeddings),
        largest_relative_gradient_difference=gap,
    )


def closed_form_step(work: Workload, examples: int):
    objective, x, pull = work.objective, *start(work, examples)
    return lambda: closed_form(objective, x, pull)


def closed_form(objective: HeadMatching, x: Tensor, pull: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    losses = objective(x) + RHO / 2 * (x - pull).square().sum(dim=(1, 2))
    return torch.autograd.grad(losses.sum(), x)[0]


def plain_step(work: Workload, examples: int):
    published, (x, _), ids = work.published, start(work, examples), work.texts(examples)
    return lambda: published.x_gradient(x, ids, torch.zeros_like(x), RHO)


def start(work: Workload, examples: int) -> tuple[Tensor, Tensor]:
    """Embeddings away from those of tokens, and those of the tokens."""
    z = work.model.embed_freely(work.texts(examples))
    shift = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z)
    return z + z.std() * 0.1 * shift, z


def largest_gap(work: Workload, ids: Tensor) -> float:
    """Compute the largest difference of the gradients of one example, relative to the published one's maximum."""
    gaps = []
    x, z = start(work, len(ids))
    for row in range(len(ids)):
        one = slice(row, row + 1)
        ours = closed_form(work.objective, x[one], z[one])
        theirs = work.published.x_gradient(x[one], ids[one], torch.zeros_like(x[one]), RHO)
        gaps.append(float((ours - theirs).abs().max() / theirs.abs().max()))
    return max(gaps)


if __name__ == "__main__":
    main()
