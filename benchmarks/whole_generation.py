"""Making texts from beginning to end: gradmm's ADMM and its default search, against the published procedure.

    python -m benchmarks.whole_generation --model ../shared/material/models/reviews-phi-9m

ADMM's time grows with T and with the inner steps, in both alike; `--iterations` (T) is small here, so that the
published procedure ends soon. The ratio against the search is for `--iterations 30 --inner-steps 50` then:
the search has no iterations.
"""

from __future__ import annotations

import argparse

from benchmarks.timing import Way, add_timing_arguments, report, seconds_per_example
from benchmarks.workload import DTYPES, INSTRUCTION, LABEL, Workload
from gradmm_core.generation import generate
from gradmm_core.settings import (
    AdmmSettings,
    GenerationSettings,
    ProjectionSettings,
    TargetGradientSettings,
)
from gradmm_core.shards import Shard
from gradmm_core.target_space import FULL


def main() -> None:
    parser = argparse.ArgumentParser(description="Generation, all of it")
    add_timing_arguments(parser)
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=2, help="T")
    parser.add_argument("--inner-steps", type=int, default=50)
    options = parser.parse_args()
    schedule = AdmmSettings(
        iterations=options.iterations, inner_steps=options.inner_steps, rho=0.1, initial_draws=1, keep="last"
    )
    plain = Workload.plain(options)
    texts = plain.texts(options.examples)
    ways = {"published": Way(lambda: plain.published.generate(texts, schedule), options.examples)}
    for dtype in DTYPES:
        work = Workload.of(options, dtype)
        admm = GenerationSettings(
            method="admm", admm=schedule, projection=ProjectionSettings(rule="nearest-of-likely", candidates=200)
        )
        for examples in sorted({options.examples, *options.batches}):
            settings = admm.model_copy(update={"batch_size": examples})
            ways[f"gradmm's ADMM, {dtype}, batch {examples}"] = Way(made(work, settings, examples), examples)
        ways[f"gradmm's search, {dtype}"] = Way(
            made(work, GenerationSettings(), options.examples), options.examples
        )
    report(
        "generation",
        seconds_per_example(ways, options.repeats),
        "published",
        options.json,
        tokens=options.tokens,
        iterations=options.iterations,
        inner_steps=options.inner_steps,
        vocabulary=len(plain.model.embeddings),
    )


def made(work: Workload, settings: GenerationSettings, examples: int):
    return lambda: generate(
        work.model,
        work.template,
        work.target,
        FULL,
        INSTRUCTION,
        "good",
        Shard(LABEL, 0, 0, examples),
        work.tokens,
        TargetGradientSettings(),
        settings,
        0,
    )


if __name__ == "__main__":
    main()
