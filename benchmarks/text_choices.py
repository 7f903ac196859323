"""What makes a synthetic text worth training on: choices from one pool of texts that the model wrote.

    python -m benchmarks.text_choices sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m-base --json choices.jsonl
    python -m benchmarks.text_choices --table choices.jsonl >> docs/experiments.md

No search and no ADMM, so that the criterion is all that differs: every seed writes a pool of its own, and every
choice takes as many texts of each class from it. Intervals are over seeds. The surest are those that the model
itself is surest of, or the product's probe: of real rows, without noise and under a guarantee (one release, which
all seeds share), or of other texts of the pool, which have seen no real row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.generation_methods import (
    Judge,
    generation_settings,
    make_target,
    some_rows,
    written,
)
from benchmarks.rows import mean_and_interval, printed_table, report
from benchmarks.target_spaces import Bench, add_arguments, bench_of
from gradmm_core.classification import predict
from gradmm_core.data import LabelledTexts
from gradmm_core.filters import token_lists
from gradmm_core.probe import Probe

CHOICES = ["as written", "lowest loss", "lowest loss, of its class"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Choices among written texts")
    if printed_table(parser, markdown):
        return
    add_arguments(parser)
    parser.add_argument("--pool", type=int, default=2000, help="texts of each class to choose from")
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--records", type=int, default=5000, help="of each class, in the release")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.set_defaults(epsilons=[1.0, 0.05], delta=1e-5)
    options = parser.parse_args()
    options.space = "default"
    bench = bench_of(options)
    real = some_rows(bench, options.records)
    target, space, probe = make_target(bench, real, options, None)
    probes = {"a probe of real rows": probe}
    for epsilon in options.epsilons:
        _, _, probes[f"a probe, epsilon {epsilon:g}"] = make_target(bench, real, options, epsilon)
    judges = {rate: Judge(bench, rate, options.steps) for rate in options.learning_rates}
    shared = {"recipe": options.recipe, "model": Path(options.model).name, "per_class": options.per_class}
    shared |= {"steps": options.steps, "pool": options.pool}

    before = judges[options.learning_rates[0]].before()
    report(shared | {"choice": "before", "learning_rate": None, "seed": 0} | before, options.json)
    for seed in options.seeds:
        settings = generation_settings(options, "zero-shot")
        pool = written(bench, target, space, settings, options.pool, seed)
        pool["probability"] = own_probabilities(bench, pool)
        surest = {"the model": pool["probability"]}
        surest |= {name: own_log_probabilities(bench, probe, pool) for name, probe in probes.items()}
        # Half of the pool is for its own probe, and has none by that.
        half = pool.groupby("label").cumcount() % 2 == 1
        data = LabelledTexts(tuple(pool.loc[half, "text"]), tuple(pool.loc[half, "label"]))
        _, _, of_written = make_target(bench, data, options, None)
        surest["a probe of written texts"] = own_log_probabilities(bench, of_written, pool).mask(half)
        for rate, judge in judges.items():
            here = shared | {"learning_rate": rate, "seed": seed}
            report(here | {"choice": "real"} | judge.real(options.per_class, seed), options.json)
            choices = {choice: chosen(pool, choice, options.per_class) for choice in CHOICES}
            for name, sureness in surest.items():
                choices[f"surest by {name}"] = highest(pool, sureness, options.per_class)
            for choice, texts in choices.items():
                loss = {"matching_loss": round(float(texts["matching_loss"].mean()), 4)}
                report(here | {"choice": choice} | loss | judge.texts(texts, seed), options.json)


def own_log_probabilities(bench: Bench, probe: Probe | None, texts: pd.DataFrame) -> pd.Series:
    """Of each text's own class, as a probe sees it."""
    assert probe is not None
    judged = probe.judge(bench.language_model, bench.template, token_lists(texts)).double().numpy()
    return pd.Series(judged[np.arange(len(texts)), columns_of(bench, texts["label"])], index=texts.index)


def highest(pool: pd.DataFrame, values: pd.Series, per_class: int) -> pd.DataFrame:
    """Texts of each class with the highest values; those without any are the last."""
    order = values.sort_values(ascending=False, kind="stable").index
    return pool.loc[order].groupby("label").head(per_class)


def own_probabilities(bench: Bench, texts: pd.DataFrame) -> NDArray[np.float64]:
    """Of each text's own class, as the model before fine-tuning sees it."""
    probabilities = predict(bench.language_model, bench.template, token_lists(texts), 64).probabilities
    return probabilities.double().numpy()[np.arange(len(texts)), columns_of(bench, texts["label"])]


def columns_of(bench: Bench, labels: Iterable[int]) -> NDArray[np.int64]:
    """Where each label's class is among the template's."""
    return np.array([bench.template.labels.index(label) for label in labels])


def chosen(pool: pd.DataFrame, choice: str, per_class: int) -> pd.DataFrame:
    if choice == "lowest loss, of its class":
        pool = pool[pool["probability"] > 1 / pool["label"].nunique()]
    if choice.startswith("lowest loss"):
        pool = pool.sort_values("matching_loss", kind="stable")
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
        lines += ["| choice | mean loss | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
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
