"""Whole generation: gradmm's ADMM and `--preset search`, compared with the published procedure.

    python -m benchmarks.whole_generation --model ../shared/material/models/reviews-phi-9m --iterations 1
    python -m benchmarks.whole_generation --model ../shared/material/models/reviews-phi-9m --batches 20 \
        --dtypes bfloat16 --repeats 1

The first command runs one of the 30 iterations (T). The second runs all of them; the published procedure takes
some ten minutes. It measures gradmm's ADMM twice, through all iterations and with the default patience, which
stops a text whose tokens have not changed for some iterations, and reports how many texts agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from benchmarks.timing import Way, add_timing_arguments, report, seconds_per_example
from benchmarks.workload import DTYPES, INSTRUCTION, LABEL, Workload
from gradmm.config.settings import (
    AdmmSettings,
    GenerationSettings,
    ProjectionSettings,
    TargetGradientSettings,
)
from gradmm.generation.generation import TextRequest, generate
from gradmm.generation.shards import Shard
from gradmm.target.target_space import FULL, make_target_space, public_texts

PATIENCE = AdmmSettings().patience or 0
UNTIL_DONE = ", until done"


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole generation")
    add_timing_arguments(parser)
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=30, help="T")
    parser.add_argument("--inner-steps", type=int, default=50)
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=DTYPES)
    options = parser.parse_args()
    schedule = AdmmSettings(
        iterations=options.iterations,
        inner_steps=options.inner_steps,
        rho=0.1,
        initial_draws=1,
        patience=None,
        keep="last",
    )
    short = schedule.model_copy(update={"iterations": 1})
    plain = on_written_text(Workload.plain(options))
    texts, published = plain.texts(options.examples), plain.published
    ways = {
        "published": Way(
            lambda: published.generate(texts, schedule),
            options.examples,
            warm_up=lambda: published.generate(texts, short),
        )
    }
    found: dict[str, pd.DataFrame] = {}

    def add(name: str, work: Workload, settings: GenerationSettings, examples: int) -> None:
        admm = settings.admm.model_copy(update={"iterations": 1})
        run = generation(work, settings, examples)
        warm_up = generation(work, settings.model_copy(update={"admm": admm}), examples)
        ways[name] = Way(lambda: found.update({name: run()}), examples, warm_up)

    for dtype in options.dtypes:
        work = replace(Workload.of(options, dtype), target=plain.target)
        for examples in sorted({options.examples, *options.batches}):
            for ending, patience in (("", None), (UNTIL_DONE, PATIENCE)):
                if ending and options.iterations <= PATIENCE:
                    continue  # too few iterations for any text to stop
                settings = GenerationSettings(
                    method="admm",
                    loss="cosine",
                    admm=schedule.model_copy(update={"patience": patience}),
                    projection=ProjectionSettings(rule="nearest-of-likely", candidates=200),
                    batch_size=examples,
                )
                add(f"gradmm's ADMM, {dtype}, batch {examples}{ending}", work, settings, examples)
        add(f"gradmm's search, {dtype}", work, GenerationSettings(method="search"), options.examples)
    seconds = seconds_per_example(ways, options.repeats)
    same = {
        name: int((found[name]["text"] == found[name.removesuffix(UNTIL_DONE)]["text"]).sum())
        for name in found
        if name.endswith(UNTIL_DONE)
    }
    report(
        "generation",
        seconds,
        "published",
        options.json,
        tokens=options.tokens,
        iterations=options.iterations,
        inner_steps=options.inner_steps,
        vocabulary=len(plain.model.embeddings),
        same_texts=same,
    )


def on_written_text(work: Workload) -> Workload:
    """Take the mean gradient of texts written by the model as target, which decides when texts stop."""
    settings = TargetGradientSettings(space="full", centred=True)
    texts = public_texts(work.model, work.template, {LABEL: INSTRUCTION}, settings)
    space, _ = make_target_space(work.model, work.template, texts, settings, clipping_norm=1.0)
    return replace(work, target=space.centres[LABEL].to(work.model.head_dtype))


def generation(work: Workload, settings: GenerationSettings, examples: int) -> Callable[[], pd.DataFrame]:
    """Return a function that generates texts."""
    shard = Shard(LABEL, 0, 0, examples)
    request = TextRequest(work.model, work.template, INSTRUCTION, "good", shard, work.tokens, settings, 0)
    return lambda: generate(request, work.target, FULL, TargetGradientSettings())


if __name__ == "__main__":
    main()
