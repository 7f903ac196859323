"""What the target space is worth in the end: accuracy after fine-tuning on text chosen by a private target.

    python -m benchmarks.private_accuracy sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m-base

Every target chooses from one and the same pool of texts that the model wrote: 50 examples of each class, each the
best of 40 (as `--preset rerank` does). Only the target differs, so what a table shows is the target's
worth. Fine-tuning is shorter than the pipeline's (one learning rate, no choice of a checkpoint); accuracies are
the mean over seeds, of the last step, on at most 1,000 test rows. Rows are printed, and appended to `--json`, as
they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.target_spaces import Bench, Records, add_arguments, bench_of
from gradmm_core.classification import predict
from gradmm_core.finetune_eval import Examples, Finetuning
from gradmm_core.model_reference import ModelReference, resolve_model
from gradmm_core.opening import Opening
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.public_text import write_texts
from gradmm_core.release_norms import ReleaseNorms
from gradmm_core.settings import FinetuneEvalSettings, TargetGradientSettings
from gradmm_core.target_gradient import TargetSums
from gradmm_core.target_space import TargetSpace, make_target_space, public_texts
from gradmm_core.template import head_gradients, make_batch, tokenise_texts
from gradmm_core.vocabulary import allowed_tokens

PER_CLASS, DRAWS = 50, 40

#: Name, settings, calibration; the last of one kind is also run without noise.
SPACES: list[tuple[str, dict[str, Any], str]] = [
    ("public-subspace 16", {"space": "public-subspace", "centred": True}, "analytic"),
    ("label-rows", {"space": "label-rows", "centred": True}, "analytic"),
    ("full", {"space": "full", "centred": False}, "paper"),
    ("full", {"space": "full", "centred": False}, "analytic"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy by target space and epsilon")
    add_arguments(parser)
    parser.add_argument("--records", nargs="+", default=["4000"], help="of each class")
    parser.add_argument("--matches", nargs="+", default=["mean", "difference"])
    parser.add_argument("--spaces", nargs="+", default=[name for name, _, _ in SPACES], help="only these")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    bench = bench_of(options)
    settings = FinetuneEvalSettings(steps=options.steps, evaluate_every=options.steps)
    reference = resolve_model(bench.recipe.model)
    judge = Judge(bench, reference, settings, options.learning_rate, options.seeds)

    def report(row: dict) -> None:
        print(json.dumps(row), flush=True)
        if options.json:
            with options.json.open("a") as stream:
                stream.write(json.dumps(row) + "\n")

    report({"texts": "before fine-tuning"} | judge.before())
    pool = Pool(bench)
    for name, examples in {"real": judge.real(PER_CLASS), "zero-shot": pool.first()}.items():
        report({"texts": name} | judge.accuracy(examples))
    for count in options.records:
        records = Records(bench, None if count == "all" else int(count))
        for row in by_target(bench, pool, records, judge, options):
            report({"records": count} | row)


def by_target(
    bench: Bench,
    pool: Pool,
    records: Records,
    judge: Judge,
    options: argparse.Namespace,
) -> Iterator[dict]:
    """Every space without noise, then at every epsilon."""
    clipping_norm = options.clipping_norm
    instructions = {c.label: c.instruction for c in bench.recipe.classes}
    texts = public_texts(bench.language_model, bench.template, instructions, bench.recipe.target_gradient)
    for name, chosen, calibration in SPACES:
        if name not in options.spaces:
            continue
        settings = TargetGradientSettings.model_validate(chosen)
        space, public = make_target_space(bench.language_model, bench.template, texts, settings, clipping_norm)
        plain = space.without_centres()
        if settings.centred:
            examples, loss = pool.best(space.centres, plain)
            row = {"space": name, "target": "public", "mean_loss_of_chosen": round(loss, 4)}
            yield row | judge.accuracy(examples)
        values = records.clipped_sums(space, clipping_norm)
        norms = ReleaseNorms.of(clipping_norm, probe_share=0.0)
        sums = TargetSums(values, dict.fromkeys(values, 0), dict.fromkeys(values, 0.0), 0.0, norms)
        for epsilon in [None, *options.epsilons]:
            if calibration == "paper" and (epsilon is None or epsilon > 1):
                continue  # the same as the next space; not proved
            mechanism = None
            if epsilon is not None:
                mechanism = GaussianMechanism(
                    epsilon=epsilon,
                    delta=options.delta,
                    clipping_norm=clipping_norm,
                    adjacency="add-or-remove",
                    calibration="paper" if calibration == "paper" else "analytic",
                )
            noisy, _ = sums.release(mechanism)
            row = {"space": name, "calibration": calibration, "epsilon": epsilon}
            row["cosine"] = round(statistics.fmean(sums.cosines(noisy).values()), 3)
            ways = {"sum": (noisy, space)}
            if settings.centred:
                means = {
                    # All of the difference, noise and all: how much a space leaves of it is what is asked.
                    label: space.mean_gradient(
                        value, label, float(records.count(label)), public[label].clip_scale, trust=1.0
                    )
                    for label, value in noisy.items()
                }
                ways = {"difference": (noisy, space), "mean": (means, plain)}
                ways = {way: ways[way] for way in options.matches}
            for target, (matched, where) in ways.items():
                examples, loss = pool.best(matched, where)
                row |= {"target": target, "mean_loss_of_chosen": round(loss, 4)}
                yield row | judge.accuracy(examples)


class Pool:
    """DRAWS texts for each of PER_CLASS examples of a class, with their gradients."""

    def __init__(self, bench: Bench) -> None:
        model, self._texts, self._gradients = bench.language_model, {}, {}
        allowed = allowed_tokens(model, bench.recipe.generation.projection.language)
        tokens = bench.recipe.generation.text_tokens
        assert isinstance(tokens, int)
        for category in bench.recipe.classes:
            opening = Opening(model, category.instruction)
            uniforms = np.random.default_rng(1).random((PER_CLASS * DRAWS, tokens))
            written = write_texts(model, allowed, opening, uniforms).tolist()
            parts = []
            for start in range(0, len(written), 200):
                part = written[start : start + 200]
                batch = make_batch(bench.template, part, [category.label] * len(part), model.device)
                with torch.no_grad():
                    parts.append(head_gradients(model, batch))
            self._texts[category.label] = written
            self._gradients[category.label] = parts

    def first(self) -> Examples:
        """What the model writes, as it comes."""
        return self._examples({label: list(range(0, len(t), DRAWS)) for label, t in self._texts.items()})

    def best(self, target: dict[int, Tensor], space: TargetSpace) -> tuple[Examples, float]:
        """The best of each example's draws, and their mean matching loss."""
        rows, losses = {}, []
        for label, parts in self._gradients.items():
            of_pool = torch.cat(
                [space.project(g, label).matching_losses(target[label].to(g.hidden.dtype)) for g in parts]
            ).view(PER_CLASS, DRAWS)
            best = of_pool.min(dim=1)
            rows[label] = (best.indices + DRAWS * torch.arange(PER_CLASS)).tolist()
            losses.append(float(best.values.mean()))
        return self._examples(rows), statistics.fmean(losses)

    def _examples(self, rows: dict[int, list[int]]) -> Examples:
        texts = [self._texts[label][row] for label, chosen in rows.items() for row in chosen]
        return Examples(texts, [label for label, chosen in rows.items() for _ in chosen])


class Judge:
    """Fine-tunes and measures; the same texts are measured once."""

    def __init__(
        self,
        bench: Bench,
        reference: ModelReference,
        settings: FinetuneEvalSettings,
        learning_rate: float,
        seeds: list[int],
    ) -> None:
        model = bench.language_model
        self._bench, self._learning_rate, self._seeds = bench, learning_rate, seeds
        self._trainer = Finetuning(reference, model.tokenizer, model.device, bench.template, settings)
        self._test = self._tokenised(bench.splits.test).sample(1000, 0)
        self._known: dict[str, dict] = {}

    def before(self) -> dict:
        return {"accuracy": round(self._measure(self._trainer.fresh_model()), 4)}

    def real(self, per_class: int) -> Examples:
        counts = dict.fromkeys(self._bench.template.labels, per_class)
        return self._tokenised(self._bench.splits.train).sample_classes(counts, 0)

    def accuracy(self, examples: Examples) -> dict:
        key = json.dumps([list(examples.texts), list(examples.labels)])
        if key not in self._known:
            started = time.perf_counter()
            found = [
                self._measure(self._trainer.finetune(examples, self._learning_rate, seed)) for seed in self._seeds
            ]
            self._known[key] = {
                "accuracy": round(statistics.fmean(found), 4),
                "by_seed": [round(value, 4) for value in found],
                "seconds": round(time.perf_counter() - started, 1),
            }
        return self._known[key]

    def _measure(self, model: Any) -> float:
        with torch.no_grad():
            predicted = predict(model, self._trainer.template, self._test.texts, 64).labels
        return statistics.fmean(a == b for a, b in zip(predicted, self._test.labels, strict=True))

    def _tokenised(self, data: Any) -> Examples:
        template = self._bench.template
        tokens = tokenise_texts(self._bench.language_model.tokenizer, data.texts, template.max_text_tokens, "data")
        return Examples(tokens, data.labels)


if __name__ == "__main__":
    main()
