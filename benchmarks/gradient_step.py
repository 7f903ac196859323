"""The most that matching one gradient can bring: steps along the real data's own mean gradient.

    python -m benchmarks.gradient_step sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m-base --json step.jsonl
    python -m benchmarks.gradient_step --table step.jsonl >> docs/experiments.md

Texts that match the target perfectly (f = 0) train a model as this gradient does, to first order. The gradient is
exact, of real rows, in the head or in all parameters; the length of the step is the best on test, so that no
honest choice does better. Beside it: several steps of Adam, each with the gradient where the last one ended, which
targets at as many checkpoints would follow; and the model as it is, with the best threshold between two classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.generation_methods import Judge
from benchmarks.rows import printed_table, report
from benchmarks.target_spaces import add_arguments, bench_of
from gradmm_core.language_model import LanguageModel
from gradmm_core.mean_gradient import in_head, mean_gradient

#: Norms of the step. The gradient's is 1.
LENGTHS = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.6, 1.0, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps along the real gradient")
    if printed_table(parser, markdown):
        return
    add_arguments(parser)
    parser.add_argument("--records", type=int, default=1000, help="real rows of each class")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[4, 16], help="steps of Adam on all rows")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of Adam")
    options = parser.parse_args()
    shared = {"recipe": options.recipe, "model": Path(options.model).name, "records": options.records}
    for row in measured(options):
        report(shared | row, options.json)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bench = bench_of(options)
    judge, template = Judge(bench, options.learning_rate, steps=1), bench.template
    real = judge.rows(options.records, 0)
    trained = judge.trainer.fresh_model()
    yield {"step": "before fine-tuning"} | judge.measure(trained)
    parameters = list(trained.model.parameters())
    gradient = mean_gradient(trained, template, real).gradient
    of_head = in_head(trained)
    for part, chosen in (("the head", of_head), ("all parameters", [True] * len(of_head))):
        along = [direction if is_chosen else None for direction, is_chosen in zip(gradient, chosen, strict=True)]
        for length in LENGTHS:
            with moved(trained, along, length):
                yield {"step": f"one step, {part}", "length": length} | judge.measure(trained)
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate)
    for step in range(1, max(options.checkpoints) + 1):
        for parameter, direction in zip(parameters, mean_gradient(trained, template, real).gradient, strict=True):
            parameter.grad = direction
        optimizer.step()
        if step in options.checkpoints:
            yield {"step": f"{step} steps of Adam, all parameters"} | judge.measure(trained)


@contextmanager
def moved(trained: LanguageModel, along: Sequence[Tensor | None], length: float) -> Iterator[None]:
    """While it lasts, a model's parameters lie so far from where they were, against a direction."""
    pairs = [(p, g) for p, g in zip(trained.model.parameters(), along, strict=True) if g is not None]
    were = [parameter.detach().clone() for parameter, _ in pairs]
    norm = torch.stack([direction.double().square().sum() for _, direction in pairs]).sum().sqrt()
    with torch.no_grad():
        for parameter, direction in pairs:
            parameter.sub_(length / norm * direction)
        yield
        for (parameter, _), was in zip(pairs, were, strict=True):
            parameter.copy_(was)


def markdown(rows: pd.DataFrame) -> str:
    """A table for each recipe and model; of a step's lengths the one with the best accuracy on test."""
    lines = []
    for (recipe, model, records), part in rows.groupby(["recipe", "model", "records"], sort=False):
        lines += ["", f"**{recipe}, {model}, {records:,} real rows of each class**", ""]
        lines += ["| | length | accuracy | AUC | highest AUC of any length | accuracy, best threshold |"]
        lines += ["|---" * 6 + "|"]
        for step, lengths in part.groupby("step", sort=False):
            best = lengths.sort_values("accuracy", ascending=False, kind="stable").iloc[0]
            length = "" if pd.isna(best["length"]) else f"{best['length']:g}"
            values = [best["accuracy"], best["auc"], lengths["auc"].max(), best["best_threshold"]]
            cells = [length, *("" if pd.isna(value) else f"{value:.3f}" for value in values)]
            lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
