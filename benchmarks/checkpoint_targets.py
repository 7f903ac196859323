"""What targets at several checkpoints would bring, and along which path: choices from one pool of written texts.

    python -m benchmarks.checkpoint_targets sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m-base --json checkpoints.jsonl
    python -m benchmarks.checkpoint_targets --table checkpoints.jsonl >> docs/results.md

Of each seed's pool the texts are chosen whose mean head gradient is nearest to that of real rows: at the start, or
there and at checkpoints of fine-tuning, the distances added up. Fine-tuning follows one of three paths: on real
rows, which a guarantee of privacy would not allow as it is; on the pool's texts as they were written; or on those
chosen at the start, neither of which costs privacy. Targets are exact, of the whole head, without noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.generation_methods import Judge, generation_settings, make_target, mean_and_interval, written
from benchmarks.rows import printed_table, report
from benchmarks.target_spaces import Bench, add_arguments, bench_of
from gradmm_core.filters import token_lists
from gradmm_core.finetune_eval import Examples
from gradmm_core.language_model import LanguageModel
from gradmm_core.settings import FinetuneEvalSettings
from gradmm_core.target_set import TargetSet, target_set
from gradmm_core.target_space import FULL
from gradmm_core.template import TokenisedTemplate, head_gradients, length_bucketed, make_batch

#: Draws the real rows of targets and of the path: none of the seeds that draw those of the arm `real`.
REAL_SEED = 1000

#: Token ids of each class's texts, and what decides how near its subsets are to the target.
Pool = dict[int, list[list[int]]]
Sets = dict[int, TargetSet]

PATHS = ["real rows", "texts as written", "texts chosen at the start"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Targets at several checkpoints")
    if printed_table(parser, markdown):
        return
    add_arguments(parser)
    parser.add_argument("--pool", type=int, default=1000, help="texts of each class to choose from")
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--records", type=int, default=1000, help="real rows of each class")
    parser.add_argument("--path-steps", type=int, default=24)
    parser.add_argument("--path-every", type=int, default=8, help="steps between two checkpoints")
    parser.add_argument("--path-batch", type=int, default=128)
    parser.add_argument("--path-learning-rate", type=float, default=3e-4)
    parser.add_argument("--learning-rate", type=float, default=3e-5, help="of the fine-tuning that is measured")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    shared = {"recipe": options.recipe, "model": Path(options.model).name, "pool": options.pool}
    shared |= {"per_class": options.per_class}
    for row in measured(options):
        report(shared | row, options.json)


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    options.space, options.epsilon = "default", None  # of a target that texts are written without
    bench = bench_of(options)
    target, space = make_target(bench, options)
    judge = Judge(bench, options.learning_rate, options.steps)
    settings = generation_settings(options, "zero-shot")
    pools = {}
    for seed in options.seeds:
        texts = written(bench, target, space, settings, options.pool, seed)
        pools[seed] = {label: token_lists(texts[texts["label"] == label]) for label in bench.template.labels}
    real = judge.rows(options.records, REAL_SEED)

    yield {"choice": "before", "seed": 0} | judge.before()
    for seed in options.seeds:
        yield {"choice": "random real rows", "seed": seed} | judge.real(options.per_class, seed)
        yield {"choice": "as written", "seed": seed} | judge.examples(_first(pools[seed], options.per_class), seed)

    start = targets_at(judge.trainer.fresh_model(), bench, real, pools)
    chosen = {seed: nearest(pool, [start[seed]], options.per_class) for seed, pool in pools.items()}
    for seed, examples in chosen.items():
        yield {"choice": "nearest at the start", "seed": seed} | judge.examples(examples, seed)

    later: dict[str, dict[int, list[Sets]]] = {path: {seed: [] for seed in pools} for path in PATHS}
    for step, model in checkpoints(judge, options, real, REAL_SEED):
        yield {"choice": f"the model after {step} steps on real rows", "seed": 0} | judge.measure(model)
        for seed, sets in targets_at(model, bench, real, pools).items():
            later["real rows"][seed].append(sets)
    for seed, pool in pools.items():
        of_paths = {"texts as written": _first(pool, options.pool), "texts chosen at the start": chosen[seed]}
        for path, examples in of_paths.items():
            for _, model in checkpoints(judge, options, examples, seed):
                later[path][seed].append(targets_at(model, bench, real, {seed: pool})[seed])
    for path, of_seeds in later.items():
        for seed, sets in of_seeds.items():
            examples = nearest(pools[seed], [start[seed], *sets], options.per_class)
            yield {"choice": f"nearest there and along {path}", "seed": seed} | judge.examples(examples, seed)


def checkpoints(
    judge: Judge, options: argparse.Namespace, examples: Examples, seed: int
) -> Iterator[tuple[int, LanguageModel]]:
    settings = FinetuneEvalSettings(
        steps=options.path_steps, evaluate_every=options.path_every, batch_size=options.path_batch
    )
    trainer = replace(judge.trainer, settings=settings)
    return trainer.checkpoints(examples, options.path_learning_rate, seed, "path")


def targets_at(model: LanguageModel, bench: Bench, real: Examples, pools: Mapping[int, Pool]) -> dict[int, Sets]:
    """Of each pool and class, what decides the distance of its subsets from the real rows' mean head gradient."""
    template, found = bench.template, {seed: {} for seed in pools}
    for label in template.labels:
        texts = [text for text, of in zip(real.texts, real.labels, strict=True) if of == label]
        target = mean_head_gradient(model, template, texts, label)
        for seed, pool in pools.items():
            found[seed][label] = target_set(model, template, pool[label], label, target, FULL, "distance")
    return found


@torch.no_grad()
def mean_head_gradient(
    model: LanguageModel, template: TokenisedTemplate, texts: Sequence[list[int]], label: int
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for rows in length_bucketed([len(text) for text in texts], 64):
        batch = make_batch(template, [texts[i] for i in rows], [label] * len(rows), model.device)
        total = total + head_gradients(model, batch).double().clipped_sum(None)
    return total / len(texts)


def nearest(pool: Pool, sets: Sequence[Sets], count: int) -> Examples:
    """The texts of each class with the least sum of distances."""
    texts, labels = [], []
    for label, of_class in pool.items():
        every = [each[label] for each in sets]
        summed = TargetSet(
            torch.stack([each.gram / each.target_square for each in every]).sum(dim=0),
            torch.stack([each.products / each.target_square for each in every]).sum(dim=0),
            torch.tensor(float(len(every)), dtype=torch.float64),
            "distance",
        )
        rows = summed.choose(count, range(len(of_class)))
        texts += [of_class[row] for row in rows]
        labels += [label] * len(rows)
    return Examples(texts, labels)


def _first(pool: Pool, count: int) -> Examples:
    pairs = [(text, label) for label, texts in pool.items() for text in texts[:count]]
    return Examples([text for text, _ in pairs], [label for _, label in pairs])


def markdown(rows: pd.DataFrame) -> str:
    """A table for each recipe and model."""
    lines = []
    for (recipe, model, pool, per_class), part in rows.groupby(
        ["recipe", "model", "pool", "per_class"], sort=False
    ):
        lines += ["", f"**{recipe}, {model}, {per_class} texts of each class out of {pool:,}**", ""]
        lines += ["| | accuracy | AUC | accuracy, best threshold |", "|---" * 4 + "|"]
        for choice, of_choice in part.groupby("choice", sort=False):
            cells = [mean_and_interval(of_choice[name], 3) for name in ("accuracy", "auc", "best_threshold")]
            lines.append(f"| {choice} ({of_choice['seed'].nunique()}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
