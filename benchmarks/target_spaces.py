"""How much of a private target is signal: every target space, against the paper's mechanism, on the same data.

    python -m benchmarks.target_spaces sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m

For each class the noisy target is compared with the clean one by the *centred* cosine: of what the data add to the
gradient of the model's own, public text. Targets that are not centred have the component along the public mean
taken out of both first. Each figure is the mean over classes and over five draws of the noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deployments.recipe_files import find_recipe
from flows.texts import response_template
from gradmm_core.data import Splits, load_splits
from gradmm_core.head_gradient import HeadGradients
from gradmm_core.language_model import LanguageModel, load_language_model
from gradmm_core.model_reference import resolve_model
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.recipe import Recipe, load_recipe
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.target_space import TargetSpace, label_rows, make_target_space, public_texts
from gradmm_core.template import (
    TokenisedTemplate,
    head_gradients,
    length_bucketed,
    make_batch,
    tokenise_template,
    tokenise_texts,
)

DRAWS = 5

#: Name, settings, calibration.
SPACES = [
    ("full (the paper)", {"space": "full"}, "paper"),
    ("full", {"space": "full"}, "analytic"),
    ("full, centred", {"space": "full", "centred": True}, "analytic"),
    ("label-rows", {"space": "label-rows"}, "paper"),
    ("label-rows", {"space": "label-rows"}, "analytic"),
    ("label-rows, centred", {"space": "label-rows", "centred": True}, "analytic"),
    *(
        (f"public-subspace {k}{', centred' if centred else ''}", settings, "analytic")
        for k in (8, 16, 32, 64)
        for centred in (False, True)
        for settings in [{"space": "public-subspace", "subspace_dimensions": k, "centred": centred}]
    ),
]


@dataclass(frozen=True)
class Bench:
    """What all spaces are measured on."""

    recipe: Recipe
    language_model: LanguageModel
    template: TokenisedTemplate
    splits: Splits


def main() -> None:
    parser = argparse.ArgumentParser(description="Signal in private targets")
    add_arguments(parser)
    parser.add_argument("--records", nargs="+", default=["500", "4000", "all"], help="of each class")
    options = parser.parse_args()
    bench = bench_of(options)

    counts = [None if count == "all" else int(count) for count in options.records]
    rows = list(measure(bench, counts, options.epsilons, options.delta, options.clipping_norm))
    print(markdown(rows, options.epsilons))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.05, 0.5, 1.0, 4.0])
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--clipping-norm", type=float, default=1.0)
    parser.add_argument("--json", type=Path)


def bench_of(options: argparse.Namespace) -> Bench:
    values = [f"data.path={options.data}", f"model.name={options.model}", *options.overrides]
    recipe = load_recipe(find_recipe(options.recipe), values)
    language_model = load_language_model(resolve_model(recipe.model))
    template = tokenise_template(language_model, response_template(recipe))
    return Bench(recipe, language_model, template, load_splits(recipe.data, template.labels, recipe.seed))


def measure(
    bench: Bench, counts: list[int | None], epsilons: list[float], delta: float, clipping_norm: float
) -> Iterator[dict]:
    """A row for each space and number of records."""
    public: dict[str, TargetSpace] = {}
    instructions = {c.label: c.instruction for c in bench.recipe.classes}
    texts = public_texts(bench.language_model, bench.template, instructions, bench.recipe.target_gradient)
    for count in counts:
        records = Records(bench, count)
        sums: dict[str, dict[int, Tensor]] = {}
        for name, chosen, calibration in SPACES:
            if name not in public:
                settings = TargetGradientSettings.model_validate(chosen | {"centred": True})
                public[name], _ = make_target_space(
                    bench.language_model, bench.template, texts, settings, clipping_norm
                )
            space, means = public[name], public[name].centres
            if not chosen.get("centred"):
                space = space.without_centres()
            key = name.removesuffix(" (the paper)")
            if key not in sums:
                sums[key] = records.clipped_sums(space, clipping_norm)
            row: dict = {"records": count or "all", "space": name, "calibration": calibration}
            row["coordinates"] = next(iter(means.values())).numel()
            for epsilon in epsilons:
                mechanism = GaussianMechanism(
                    epsilon=epsilon,
                    delta=delta,
                    clipping_norm=clipping_norm,
                    adjacency="add-or-remove",
                    calibration=calibration if epsilon <= 1 else "analytic",
                )
                row[f"{epsilon:g}"] = centred_cosine(sums[key], mechanism, {} if chosen.get("centred") else means)
            yield row


class Records:
    """A random part of every class. Its gradients' label rows are kept; in full they would not fit in memory."""

    def __init__(self, bench: Bench, count: int | None) -> None:
        self._bench, self._count = bench, count
        self._rows = torch.tensor(label_rows(bench.template), device=bench.language_model.device)
        self._kept = {
            label: [TargetSpace(self._rows, None, {}).project(batch, label) for batch in self._read(label)]
            for label in bench.template.labels
        }

    def count(self, label: int) -> int:
        """How many there are of a class."""
        return sum(len(batch.hidden) for batch in self._kept[label])

    def clipped_sums(self, space: TargetSpace, clipping_norm: float) -> dict[int, Tensor]:
        """Of each class, in the space."""
        in_rows = replace(space, rows=None)  # what was kept has no other rows
        sums = {}
        for label, kept in self._kept.items():
            batches = self._read(label) if space.rows is None else kept
            total = torch.zeros((), dtype=torch.float64)
            for gradients in batches:
                total = total + in_rows.project(gradients, label).clipped_sum(clipping_norm)
            sums[label] = total
        return sums

    def _read(self, label: int) -> Iterator[HeadGradients]:
        bench = self._bench
        rows = np.random.default_rng(0).permutation(bench.splits.train.of_class(label))[: self._count]
        tokens = tokenise_texts(
            bench.language_model.tokenizer,
            [bench.splits.train.texts[row] for row in rows],
            bench.template.max_text_tokens,
            "train",
        )
        for part in length_bucketed([len(t) for t in tokens], 256):
            batch = make_batch(
                bench.template, [tokens[i] for i in part], [label] * len(part), bench.language_model.device
            )
            with torch.no_grad():
                yield head_gradients(bench.language_model, batch).double()


def centred_cosine(sums: dict[int, Tensor], mechanism: GaussianMechanism, means: dict[int, Tensor]) -> float:
    """Of noisy and clean, each without its component along the public mean where one is given."""

    def without_mean(value: Tensor, label: int) -> Tensor:
        if label not in means:
            return value.flatten()
        mean = means[label].flatten()
        return value.flatten() - (value.flatten() @ mean) / (mean @ mean) * mean

    cosines = [
        F.cosine_similarity(
            without_mean(clean + torch.from_numpy(mechanism.noise(tuple(clean.shape))), label),
            without_mean(clean, label),
            dim=0,
        )
        for label, clean in sums.items()
        for _ in range(DRAWS)
    ]
    return round(float(torch.stack(cosines).mean()), 3)


def markdown(rows: list[dict], epsilons: list[float]) -> str:
    names = ["records", "space", "calibration", "coordinates", *(f"{e:g}" for e in epsilons)]
    heads = ["records per class", "space", "calibration", "coordinates", *(f"eps {e:g}" for e in epsilons)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
