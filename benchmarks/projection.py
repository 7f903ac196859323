"""The projection to readable tokens: one cached step per token, compared with reading the prompt again.

    python -m benchmarks.projection --model ../shared/material/models/reviews-phi-9m

Both take the nearest of the 200 likeliest tokens. The report includes the share of equal tokens in float32.
"""

from __future__ import annotations

import argparse

from benchmarks.published import BATCH
from benchmarks.timing import Way, add_timing_arguments, report, seconds_per_example
from benchmarks.workload import INSTRUCTION, Workload, ways_of_gradmm
from benchmarks.x_update import start
from gradmm.config.settings import ProjectionSettings
from gradmm.generation.projection import Projector


def main() -> None:
    parser = argparse.ArgumentParser(description="Projection with and without a cache")
    add_timing_arguments(parser)
    options = parser.parse_args()
    plain = Workload.plain(options)
    published, x = plain.published, start(plain, BATCH)[0]
    ways = {"published": Way(lambda: published.project(x), BATCH)} | ways_of_gradmm(options, projection)
    same = (projection(plain, BATCH)() == published.project(x)).double().mean()
    report(
        "projection",
        seconds_per_example(ways, options.repeats),
        "published",
        options.json,
        tokens=options.tokens,
        vocabulary=len(plain.model.embeddings),
        share_of_same_tokens=float(same),
    )


def projection(work: Workload, examples: int):
    settings = ProjectionSettings(rule="nearest-of-likely", candidates=200)
    project, x = Projector(work.model, work.allowed, INSTRUCTION, settings), start(work, examples)[0]
    return lambda: project(x)


if __name__ == "__main__":
    main()
