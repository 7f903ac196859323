"""How a release's norm is best divided: what the gradient keeps, and what a probe is worth with the rest.

    python -m benchmarks.probe_shares sst2 --data ../shared/material/data/sst2 \
        --model ../shared/material/models/reviews-phi-9m-base --json shares.jsonl
    python -m benchmarks.probe_shares --table shares.jsonl >> docs/experiments.md

No text is generated. Every guarantee is the recipe's own, for one release of all train rows; every division has a
probe with as many directions as the product would give it there, or times as many. The probe's AUC is on test rows
(the mean over classes of one against the rest); the cosine is that of the noisy target and the clean one, both
about the public centre. All figures are means over draws of the noise, which cannot be had again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float, Int
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.rows import printed_table, report
from benchmarks.target_spaces import Bench, add_arguments, bench_of
from gradmm_core.arm_recipes import with_epsilon
from gradmm_core.data import LabelledTexts
from gradmm_core.head_gradient import HeadGradients
from gradmm_core.privacy import GaussianMechanism, gaussian_mechanism
from gradmm_core.probe import fit_probe
from gradmm_core.release_norms import MOST_DIMENSIONS, ReleaseNorms, fitting_dimensions
from gradmm_core.target_gradient import TargetSums
from gradmm_core.target_space import TargetSpace, make_target_space, public_texts
from gradmm_core.template import head_gradients, length_bucketed, make_batch, tokenise_split
from gradmm_core.text_features import TextFeatures, text_means

BATCH_SIZE = 128


@dataclass(frozen=True)
class Read:
    """Texts of one class: gradients about the centre, in the target's space, and means of hidden states."""

    gradients: list[HeadGradients]
    means: Float[Tensor, "texts width"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Divisions of a release's norm")
    if printed_table(parser, markdown):
        return
    add_arguments(parser)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument(
        "--class-sum-shares",
        type=float,
        nargs="+",
        default=[0.1, 0.3, 0.5],
        help="of the probe's, the class sums'",
    )
    parser.add_argument("--times", type=float, nargs="+", default=[1], help="the product's number of directions")
    parser.add_argument("--draws", type=int, default=5)
    parser.set_defaults(epsilons=[0.05, 0.2, 1.0, 4.0])
    options = parser.parse_args()
    bench = bench_of(options)
    recipe, template = bench.recipe, bench.template
    instructions = {c.label: c.instruction for c in recipe.classes}
    texts = public_texts(bench.language_model, template, instructions, recipe.target_gradient)
    space, _ = make_target_space(
        bench.language_model, template, texts, recipe.target_gradient, options.clipping_norm
    )
    labels, everyone = template.labels, [text for of_class in texts.values() for text in of_class]
    public = read(bench, space, everyone, labels[0]).means.double()
    train, test = (by_class(bench, space, split) for split in (bench.splits.train, bench.splits.test))
    shared = {"recipe": options.recipe, "model": Path(options.model).name, "records": len(bench.splits.train)}
    for epsilon in options.epsilons:
        privacy = with_epsilon(recipe, epsilon).privacy
        mechanism = gaussian_mechanism(privacy.model_copy(update={"clipping_norm": options.clipping_norm}))
        assert mechanism is not None
        assert privacy.declared_records is not None
        for share in options.shares:
            for class_sum_share in options.class_sum_shares:
                norms = ReleaseNorms.of(options.clipping_norm, share, class_sum_share)
                fitting = fitting_dimensions(norms.second_moment, mechanism.sigma, privacy.declared_records)
                division = {"epsilon": epsilon, "share": share, "class_sum_share": class_sum_share}
                for times in options.times:
                    features = TextFeatures.of_public(public, min(round(times * fitting), MOST_DIMENSIONS))
                    row = released(train, test, features, norms, mechanism, options.draws)
                    report(shared | division | {"dimensions": len(features.map)} | row, options.json)


def by_class(bench: Bench, space: TargetSpace, split: LabelledTexts) -> dict[int, Read]:
    """All rows of a split."""
    found = {}
    for label in bench.template.labels:
        rows = [split.texts[row] for row in split.of_class(label)]
        tokens = tokenise_split(bench.language_model.tokenizer, rows, bench.template.max_text_tokens, "data")
        found[label] = read(bench, space, [tokens[i] for i in range(len(rows))], label)
    return found


@torch.no_grad()
def read(bench: Bench, space: TargetSpace, texts: Sequence[list[int]], label: int) -> Read:
    gradients, means = [], []
    for rows in length_bucketed([len(text) for text in texts], BATCH_SIZE):
        chosen = [texts[row] for row in rows]
        batch = make_batch(bench.template, chosen, [label] * len(chosen), bench.language_model.device)
        layers = bench.language_model.layers(input_ids=batch.input_ids)
        factors = head_gradients(bench.language_model, batch, layers[-1]).double()
        gradients.append(space.project(factors, label))
        means.append(text_means(layers, batch.text_mask).cpu())
    return Read(gradients, torch.cat(means))


def released(
    train: dict[int, Read],
    test: dict[int, Read],
    features: TextFeatures,
    norms: ReleaseNorms,
    mechanism: GaussianMechanism,
    draws: int,
) -> dict[str, float]:
    """One division's figures."""
    vectors = {label: features.with_constant(of_class.means) for label, of_class in train.items()}
    second_moment = torch.stack([of_class.mT @ of_class for of_class in vectors.values()]).sum(dim=0)
    sums = TargetSums(
        values={label: clipped_sum(of_class.gradients, norms.gradient) for label, of_class in train.items()},
        records={label: len(of_class) for label, of_class in vectors.items()},
        text_tokens={},
        clip_fraction=math.nan,
        norms=norms,
        class_sums={label: norms.class_sum * of_class.sum(dim=0) for label, of_class in vectors.items()},
        second_moment=norms.second_moment * second_moment,
    )
    points = torch.cat([of_class.means for of_class in test.values()])
    columns = torch.cat([torch.full((len(r.means),), column) for column, r in enumerate(test.values())])

    aucs, trusts, cosines = [], [], []
    for _ in range(draws):
        values, moments = sums.release(mechanism)
        assert moments is not None
        probe = fit_probe(features, moments)
        aucs.append(auc(probe.log_probabilities(points), columns))
        trusts.append(probe.trust)
        cosines += sums.cosines(values).values()
    figures = {"auc": aucs, "trust": trusts, "cosine": cosines}
    return {name: round(statistics.fmean(values), 4) for name, values in figures.items()}


def clipped_sum(batches: Sequence[HeadGradients], norm: float) -> Float[Tensor, "rows dimensions"]:
    return torch.stack([batch.clipped_sum(norm).cpu() for batch in batches]).sum(dim=0)


def auc(log_probabilities: Float[Tensor, "texts classes"], columns: Int[Tensor, " texts"]) -> float:
    """Of each class against the rest, the mean over classes."""
    values = log_probabilities.double().numpy()
    found = [roc_auc_score(columns == column, values[:, column]) for column in range(values.shape[1])]
    return sum(found) / len(found)


def markdown(rows: pd.DataFrame) -> str:
    """A table for each recipe and model: per guarantee, a row for each division."""
    lines = []
    for (recipe, model, records), part in rows.groupby(["recipe", "model", "records"], sort=False):
        lines += ["", f"**{recipe}, {model}, {records:,} rows**", ""]
        lines += ["| epsilon | the probe's share | the class sums' of it | directions | trust | AUC | cosine |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| {row.epsilon:g} | {row.share:g} | {row.class_sum_share:g} | {row.dimensions} | {row.trust:.2f} "
            f"| {row.auc:.3f} | {row.cosine:.3f} |"
            for row in part.itertuples()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
