"""What makes a synthetic text worth training on: choices from one pool of texts that the model wrote.

    python -m benchmarks.text_choices sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m-base --json choices.jsonl
    python -m benchmarks.text_choices --table choices.jsonl >> docs/results.md

No search and no ADMM, so that the criterion is all that differs: every seed writes a pool of its own, and every
choice takes as many texts of each class from it. Intervals are over seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.generation_methods import Judge, generation_settings, make_target, mean_and_interval, written
from benchmarks.rows import printed_table, report
from benchmarks.target_spaces import Bench, add_arguments, bench_of
from gradmm_core.classification import predict
from gradmm_core.filters import token_lists

CHOICES = ["as written", "lowest f", "lowest f, of its class", "surest of its class"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Choices among written texts")
    if printed_table(parser, markdown):
        return
    add_arguments(parser)
    parser.add_argument("--pool", type=int, default=800, help="texts of each class to choose from")
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--records", type=int, default=4000, help="of each class, in the target")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    options.space, options.epsilon = "default", None
    bench = bench_of(options)
    target, space = make_target(bench, options)
    judges = {rate: Judge(bench, rate, options.steps) for rate in options.learning_rates}
    shared = {"recipe": options.recipe, "model": Path(options.model).name, "per_class": options.per_class}
    shared |= {"steps": options.steps, "pool": options.pool}

    before = judges[options.learning_rates[0]].before()
    report(shared | {"choice": "before", "learning_rate": None, "seed": 0} | before, options.json)
    for seed in options.seeds:
        settings = generation_settings(options, "zero-shot")
        pool = written(bench, target, space, settings, options.pool, seed)
        pool["probability"] = own_probabilities(bench, pool)
        for rate, judge in judges.items():
            here = shared | {"learning_rate": rate, "seed": seed}
            report(here | {"choice": "real"} | judge.real(options.per_class, seed), options.json)
            for choice in CHOICES:
                texts = chosen(pool, choice, options.per_class)
                loss = {"matching_loss": round(float(texts["matching_loss"].mean()), 4)}
                report(here | {"choice": choice} | loss | judge.texts(texts, seed), options.json)


def own_probabilities(bench: Bench, texts: pd.DataFrame) -> NDArray[np.float64]:
    """Of each text's own class, as the model before fine-tuning sees it."""
    probabilities = predict(bench.language_model, bench.template, token_lists(texts), 64).probabilities
    columns = [bench.template.labels.index(label) for label in texts["label"]]
    return probabilities.double().numpy()[np.arange(len(texts)), columns]


def chosen(pool: pd.DataFrame, choice: str, per_class: int) -> pd.DataFrame:
    if choice == "lowest f, of its class":
        pool = pool[pool["probability"] > 1 / pool["label"].nunique()]
    if choice.startswith("lowest f"):
        pool = pool.sort_values("matching_loss", kind="stable")
    if choice == "surest of its class":
        pool = pool.sort_values("probability", ascending=False, kind="stable")
    return pool.groupby("label").head(per_class)


def markdown(rows: pd.DataFrame) -> str:
    """A table for each recipe, model, and number of texts and steps; a pair of columns for each learning rate."""
    lines = []
    for (recipe, model, per_class, steps, pool), part in rows.groupby(
        ["recipe", "model", "per_class", "steps", "pool"], sort=False
    ):
        rates = sorted(part["learning_rate"].dropna().unique())
        lines += ["", f"**{recipe}, {model}, {per_class} texts of each class out of {pool}, {steps} steps**", ""]
        heads = [f"{rate:g}: {name}" for rate in rates for name in ("accuracy", "AUC")]
        lines += ["| choice | mean f | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
        for choice, of_choice in part.groupby("choice", sort=False):
            loss = of_choice["matching_loss"].mean()
            cells = [f"{of_choice['seed'].nunique()}", "" if np.isnan(loss) else f"{loss:.4f}"]
            for rate in rates:
                # What the model does before fine-tuning has no learning rate.
                of_rate = of_choice[of_choice["learning_rate"].isin([rate]) | of_choice["learning_rate"].isna()]
                cells += [mean_and_interval(of_rate[name], 3) for name in ("accuracy", "auc")]
            lines.append(f"| {choice} ({cells[0]}) | " + " | ".join(cells[1:]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
