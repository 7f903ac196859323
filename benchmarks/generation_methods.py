"""What each way of making texts gets for its compute: match, readability, variety, and accuracy after fine-tuning.

    python -m benchmarks.generation_methods sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m-base --json sst2.jsonl
    python -m benchmarks.generation_page sst2.jsonl --out docs/results/generation-methods.md

All methods match one target; with an epsilon each seed has a release of its own. `rerank` is given as many passes
through the model's body as `search` used (column `token_passes` of the stage). Every seed makes other texts, draws
other real ones and shuffles otherwise; the intervals are over seeds. Of the paper's procedure one round of 30 is
run, which costs two thirds of a search: with its rho the others change hardly a token
(`benchmarks.admm_settings`). `--methods paper` runs all of them. What one matching loss has chosen is reported by
both.
Fine-tuning is shorter than the pipeline's: one learning rate, the last step, at most 1,000 test rows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.rows import report
from benchmarks.target_spaces import Bench, add_arguments, bench_of
from deployments.recipe_files import find_preset, find_recipe
from gradmm_core.classification import class_logits
from gradmm_core.data import LabelledTexts
from gradmm_core.filters import text_figures, token_lists
from gradmm_core.finetune_eval import Examples, Finetuning
from gradmm_core.generation import generate
from gradmm_core.language_model import LanguageModel
from gradmm_core.model_reference import resolve_model
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.probe import Probe, fit_probe
from gradmm_core.recipe import load_recipe
from gradmm_core.release_norms import ReleaseNorms, settled
from gradmm_core.settings import FinetuneEvalSettings, GenerationSettings, MatchingLoss, TargetGradientSettings
from gradmm_core.shards import Shard
from gradmm_core.study_record import machine, source_commit
from gradmm_core.target_gradient import target_sums
from gradmm_core.target_set import TargetSet, target_set
from gradmm_core.target_space import FULL, TargetSpace, difference_trust, make_target_space, public_texts
from gradmm_core.template import tokenise_texts
from gradmm_core.variety import distinct_n, self_bleu

#: The preset that makes it, and what differs from it; `search` is the default.
METHODS: dict[str, tuple[str | None, list[str]]] = {
    "zero-shot": ("zero-shot", []),
    "rerank": ("rerank", []),
    "rerank by cosine": ("rerank", ["generation.loss=cosine"]),
    "search": (None, []),
    "search without a probe": (None, ["generation.probe_weight=0"]),
    "search by cosine": (None, ["generation.loss=cosine", "generation.probe_weight=0"]),
    "paper, one round": ("paper", ["generation.admm.iterations=1"]),
    "paper": ("paper", []),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ways of generating, at equal compute")
    add_arguments(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["real", "zero-shot", "search", "search without a probe", "rerank", "paper, one round"],
    )
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--records", type=int, default=4000, help="of each class, in the target")
    parser.add_argument("--space", choices=["default", "full"], default="default")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--no-accuracy", action="store_true")
    options = parser.parse_args()
    bench = bench_of(options)
    data = some_rows(bench, options.records)
    target, space, probe = make_target(bench, data, options, options.epsilon)
    judge = None if options.no_accuracy else Judge(bench, options.learning_rate, options.steps)
    shared = {"recipe": options.recipe, "model": Path(options.model).name, "space": options.space}
    shared |= {"epsilon": options.epsilon}
    shared |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": source_commit(), "machine": machine()}

    if judge:
        report(shared | {"method": "before", "seed": 0} | judge.before(), options.json)
    for number, seed in enumerate(options.seeds):
        if number and options.epsilon is not None:  # other noise
            target, space, probe = make_target(bench, data, options, options.epsilon)
        draws = dict.fromkeys(get_args(MatchingLoss), generation_settings(options, "rerank").search.draws)
        for method in options.methods:
            if method == "real":
                assert judge
                report(
                    shared | {"method": method, "seed": seed} | judge.real(options.per_class, seed), options.json
                )
                continue
            settings = generation_settings(options, method)
            if method.startswith("rerank"):
                settings = with_draws(settings, draws[settings.loss])
            started = time.perf_counter()
            texts = written(bench, target, space, settings, options.per_class, seed, probe)
            row = figures(bench, texts, target, space) | {"seconds": round(time.perf_counter() - started, 1)}
            if method.startswith("search"):
                rerank = generation_settings(options, "rerank")
                draws[settings.loss] = round(row["token_passes"] / passes_of_a_draw(bench, rerank))
            row |= judge.texts(texts, seed) if judge else {}
            if probe:
                row |= {"probe_dimensions": len(probe.features.map), "probe_trust": round(probe.trust, 3)}
            report(shared | {"method": method, "seed": seed} | row, options.json)


def generation_settings(options: argparse.Namespace, method: str) -> GenerationSettings:
    """The recipe's, by the method's preset; `--set generation...` changes the default method alone."""
    preset, changes = METHODS[method]
    overrides = [f"data.path={options.data}", f"model.name={options.model}", *options.overrides]
    if preset is not None:
        overrides = [o for o in overrides if not o.startswith("generation.")]
        # The paper's calibration is refused for a larger epsilon; here a target is given.
        overrides.append("privacy.calibration=analytic")
    preset_file = None if preset is None else find_preset(preset)
    return load_recipe(find_recipe(options.recipe), [*overrides, *changes], preset_file).generation


def with_draws(settings: GenerationSettings, draws: int) -> GenerationSettings:
    return settings.model_copy(update={"search": settings.search.model_copy(update={"draws": draws})})


def some_rows(bench: Bench, count: int) -> LabelledTexts:
    """Random train rows: at most `count` of each class, the same ones each time."""
    train, random = bench.splits.train, np.random.default_rng(0)
    chosen = [random.permutation(train.of_class(label))[:count] for label in bench.template.labels]
    return train.take(np.concatenate(chosen).tolist())


def make_target(
    bench: Bench, data: LabelledTexts, options: argparse.Namespace, epsilon: float | None
) -> tuple[dict[int, torch.Tensor], TargetSpace, Probe | None]:
    """As the pipeline makes it. The whole head has no probe."""
    clipping_norm = options.clipping_norm
    if options.space == "full":
        settings = TargetGradientSettings(space="full", centred=False, probe_share=0.0)
        sums = target_sums(bench.language_model, bench.template, data, settings, clipping_norm, None)
        return sums.values, FULL, None
    mechanism = None
    if epsilon is not None:
        mechanism = GaussianMechanism(
            epsilon=epsilon,
            delta=options.delta,
            clipping_norm=clipping_norm,
            adjacency="add-or-remove",
            calibration="analytic",
        )
    settings = settled(TargetGradientSettings(), clipping_norm, mechanism and mechanism.sigma, len(data))
    instructions = {c.label: c.instruction for c in bench.recipe.classes}
    texts = public_texts(bench.language_model, bench.template, instructions, settings)
    norms = ReleaseNorms.of(clipping_norm, settings.probe_share)
    space, public = make_target_space(
        bench.language_model, bench.template, texts, settings, norms.gradient, settings.directions
    )
    sums = target_sums(bench.language_model, bench.template, data, settings, clipping_norm, mechanism, space)
    values, moments = sums.release(mechanism)
    means = {}
    for label, value in values.items():
        records, clip_scale = float(sums.records[label]), public[label].clip_scale
        trust = difference_trust(value, records, norms.gradient, mechanism.sigma if mechanism else 0.0)
        means[label] = space.mean_gradient(value, label, records, clip_scale, trust)
    probe = None if space.features is None or moments is None else fit_probe(space.features, moments)
    return means, space.without_centres(), probe


def written(
    bench: Bench,
    target: dict[int, torch.Tensor],
    space: TargetSpace,
    settings: GenerationSettings,
    per_class: int,
    seed: int,
    probe: Probe | None = None,
) -> pd.DataFrame:
    tokens = bench.recipe.generation.text_tokens
    assert isinstance(tokens, int)
    parts = [
        generate(
            bench.language_model,
            bench.template,
            target[category.label].float(),
            space,
            category.instruction,
            category.name,
            Shard(category.label, 0, 0, per_class),
            tokens,
            TargetGradientSettings(),
            settings,
            seed,
            probe,
        )
        for category in bench.recipe.classes
    ]
    return pd.concat(parts, ignore_index=True)


def passes_of_a_draw(bench: Bench, rerank: GenerationSettings) -> float:
    """Token passes of one more draw, on average: it is written, cut, then scored."""
    zero = {label: torch.ones_like(bench.language_model.head) for label in bench.template.labels}
    cost = []
    for draws in (1, 2):
        texts = written(bench, zero, FULL, with_draws(rerank, draws), 20, 0)
        cost.append(texts["token_passes"].mean())
    return cost[1] - cost[0]


def figures(
    bench: Bench, texts: pd.DataFrame, target: dict[int, torch.Tensor], space: TargetSpace
) -> dict[str, Any]:
    sets = []
    for label in bench.template.labels:
        tokens = token_lists(texts[texts["label"] == label])
        sets.append(
            target_set(bench.language_model, bench.template, tokens, label, target[label], space, "distance")
        )
    cosine, of_set = _mean_losses([replace(of_class, kind="cosine") for of_class in sets])
    distance, distance_of_set = _mean_losses(sets)
    found = text_figures(texts)
    return {
        "texts": len(texts),
        "matching_loss": cosine,
        "set_loss": of_set,
        "distance": distance,
        "set_distance": distance_of_set,
        "shares": [round(float(each.products.mean() / each.target_square), 4) for each in sets],
        "log_perplexity": round(found["mean_log_perplexity"], 3),
        "distinct_2": round(distinct_n(texts["text"], 2), 4),
        "self_bleu": round(self_bleu(texts["text"].tolist()), 4),
        "token_passes": round(float(texts["token_passes"].mean()), 1),
        "sample": texts.groupby("label").head(10)["text"].tolist(),
    }


def _mean_losses(sets: list[TargetSet]) -> tuple[float, float]:
    """Of the texts, each by itself, and of the classes' sets."""
    alone = fmean(each.loss([row]) for each in sets for row in range(len(each.products)))
    return round(alone, 5), round(fmean(each.loss(range(len(each.products))) for each in sets), 5)


class Judge:
    """Fine-tunes and measures."""

    def __init__(self, bench: Bench, learning_rate: float, steps: int) -> None:
        model = bench.language_model
        settings = FinetuneEvalSettings(steps=steps, evaluate_every=steps)
        reference = resolve_model(bench.recipe.model)
        self._bench, self._learning_rate = bench, learning_rate
        self.trainer = Finetuning(reference, model.tokenizer, model.device, bench.template, settings)
        self._test = self._tokenised(bench.splits.test).sample(1000, 0)
        self._train = self._tokenised(bench.splits.train)

    def before(self) -> dict[str, float]:
        return self.measure(self.trainer.fresh_model())

    def real(self, per_class: int, seed: int) -> dict[str, float]:
        return self._after(self.rows(per_class, seed), seed)

    def rows(self, per_class: int, seed: int) -> Examples:
        """Random real ones."""
        return self._train.sample_classes(dict.fromkeys(self._bench.template.labels, per_class), seed)

    def texts(self, texts: pd.DataFrame, seed: int) -> dict[str, float]:
        return self._after(Examples(token_lists(texts), texts["label"].tolist()), seed)

    def _after(self, examples: Examples, seed: int) -> dict[str, float]:
        return self.measure(self.trainer.finetune(examples, self._learning_rate, seed))

    def measure(self, model: LanguageModel) -> dict[str, float]:
        """Accuracy; of two classes also the AUC, and the accuracy with the threshold that is best on test."""
        labels = self.trainer.template.labels
        logits = class_logits(model, self.trainer.template, self._test.texts, 64)
        truth = torch.tensor([labels.index(label) for label in self._test.labels])
        found = {"accuracy": float((logits.argmax(dim=1) == truth).double().mean())}
        if len(labels) == 2:
            margin = logits[:, 1] - logits[:, 0]
            found["auc"] = float(roc_auc_score(truth.numpy(), margin.numpy()))
            found["best_threshold"] = best_accuracy(margin, truth)
        return {name: round(value, 4) for name, value in found.items()}

    def _tokenised(self, data: Any) -> Examples:
        template = self._bench.template
        tokens = tokenise_texts(self._bench.language_model.tokenizer, data.texts, template.max_text_tokens, "data")
        return Examples(tokens, data.labels)


def best_accuracy(margin: Tensor, truth: Tensor) -> float:
    """Over all thresholds: the rows above it are called 1. Equal margins fall on one side together."""
    values, place = margin.unique(return_inverse=True)  # sorted
    gained = torch.zeros(len(values), dtype=torch.int64).index_add_(0, place, 1 - 2 * truth)
    correct = torch.cat([truth.sum()[None], truth.sum() + gained.cumsum(0)])
    return float(correct.max()) / len(truth)


if __name__ == "__main__":
    main()
