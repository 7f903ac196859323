"""What ADMM gets from its settings: rho over the paper's range, both projection rules, k small and large.

    python -m benchmarks.admm_settings sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m --json admm.jsonl

The target is the whole head's, as in the paper, without noise. "first" is the matching loss after the first
projection, "best" the lowest of all of them, text by text.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from benchmarks.generation_methods import make_target, some_rows, written
from benchmarks.target_spaces import add_arguments, bench_of
from gradmm_core.settings import AdmmSettings, GenerationSettings, ProjectionSettings


def main() -> None:
    parser = argparse.ArgumentParser(description="Settings of ADMM")
    add_arguments(parser)
    parser.add_argument("--rhos", type=float, nargs="+", default=[0.001, 0.01, 0.1, 1.0, 10.0])
    parser.add_argument("--rules", nargs="+", default=["nearest-of-likely", "likeliest-of-near"])
    parser.add_argument("--candidates", type=int, nargs="+", default=[30, 200])
    parser.add_argument("--per-class", type=int, default=5)
    parser.add_argument(
        "--patience", type=int, help="iterations without a new token that end a text (default: none)"
    )
    parser.add_argument("--records", type=int, default=2000, help="of each class, in the target")
    options = parser.parse_args()
    options.space = "full"
    bench = bench_of(options)
    target, space, _ = make_target(bench, some_rows(bench, options.records), options, None)
    print(
        "| rule | k | rho | first f | last f | best f | log-perplexity | passes | seconds per text |\n"
        + "|---" * 9
        + "|"
    )
    for rule in options.rules:
        for candidates in options.candidates:
            for rho in options.rhos:
                settings = GenerationSettings(
                    method="admm",
                    loss="cosine",
                    admm=AdmmSettings(rho=rho, patience=options.patience),
                    projection=ProjectionSettings(rule=rule, candidates=candidates),
                )
                started = time.perf_counter()
                texts = written(bench, target, space, settings, options.per_class, seed=0)
                history = np.stack(texts["loss_history"].tolist())
                row = {
                    "rule": rule,
                    "k": candidates,
                    "rho": rho,
                    "first": round(float(history[:, 0].mean()), 4),
                    "last": round(float(history[:, -1].mean()), 4),
                    "best": round(float(texts["matching_loss"].mean()), 4),
                    "log_perplexity": round(float(texts["log_perplexity"].mean()), 2),
                    "passes": round(float(texts["token_passes"].mean())),
                    "seconds": round((time.perf_counter() - started) / len(texts), 1),
                }
                print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
                if options.json:
                    with options.json.open("a") as stream:
                        stream.write(json.dumps(row | {"sample": texts["text"].tolist()[:2]}) + "\n")


if __name__ == "__main__":
    main()
