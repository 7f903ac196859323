"""The last stage of each study: one cheap table from the rows of its upstream stages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import pandas as pd

from gradmm.storage.artifacts import StageArtifact
from gradmm.studies.bounds import HELD, bounds_over_seeds
from gradmm.studies.compare import compare_arms, with_gap_recovered
from gradmm.studies.gradients import gradients_over_seeds
from gradmm.target.cosine import target_cosine
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("compare")
def compare(context: RunContext, evaluations: list[StageArtifact], measures: list[StageArtifact]) -> Outcome:
    """Tabulate one row per arm and size."""
    table = with_gap_recovered(compare_arms(_rows(evaluations), _rows(measures)))
    verdicts = table["verdict"].dropna().value_counts()
    return table, {"arms": int(table["arm"].nunique()), "verdicts": {str(k): int(n) for k, n in verdicts.items()}}


@stage_task("scarce")
def scarce(context: RunContext, few: list[int], evaluations: list[list[StageArtifact]]) -> Outcome:
    """Tabulate one row per arm and number of real rows, the column `size`.

    Args:
        few: numbers of real rows.
        evaluations: of all arms and seeds, for each entry of `few`.
    """
    rows = [_rows(group).assign(size=size) for size, group in zip(few, evaluations, strict=True)]
    return compare_arms(pd.concat(rows, ignore_index=True)), {}


@stage_task("transfer")
def transfer(context: RunContext, models: list[str], evaluations: list[list[StageArtifact]]) -> Outcome:
    """Tabulate one row per model and arm.

    Args:
        evaluations: of all arms and seeds, for each entry of `models`.
    """
    tables = [
        compare_arms(_rows(group)).assign(model=model) for model, group in zip(models, evaluations, strict=True)
    ]
    return pd.concat(tables, ignore_index=True), {}


@stage_task("ablate")
def ablate(
    context: RunContext,
    arms: list[str],
    generations: list[list[StageArtifact]],
    evaluations: list[StageArtifact],
    measures: list[StageArtifact],
) -> Outcome:
    """Tabulate one row per variant of the recipe, with the mean matching loss and token passes of its generations.

    Args:
        generations: one for every seed, for each entry of `arms`.
    """
    figures = {"matching_loss": "mean_matching_loss", "token_passes": "token_passes_per_text"}
    generated = pd.DataFrame(
        [
            {"arm": arm}
            | {
                column: statistics.fmean(one.figures.get(name, math.nan) for one in group)
                for column, name in figures.items()
            }
            for arm, group in zip(arms, generations, strict=True)
        ]
    )
    table = compare_arms(_rows(evaluations), _rows(measures))
    return table.merge(generated, on="arm", how="left", validate="one_to_one"), {}


@stage_task("scale")
def scale(
    context: RunContext,
    arms: dict[str, str],
    generations: list[StageArtifact],
    evaluations: list[StageArtifact],
) -> Outcome:
    """Tabulate one row per arm and size, with the generation method and its token passes per text.

    Args:
        arms: the method of each arm, in the order of `generations`, which are the first seed's.
    """
    table = compare_arms(_rows(evaluations))
    passes = {arm: made.figures["token_passes_per_text"] for arm, made in zip(arms, generations, strict=True)}
    return table.assign(method=table["arm"].map(arms), token_passes=table["arm"].map(passes)), {}


@stage_task("epsilon")
def epsilon(
    context: RunContext,
    clean: StageArtifact,
    epsilons: dict[str, float],
    targets: list[StageArtifact],
    evaluations: list[StageArtifact],
    measures: list[StageArtifact],
) -> Outcome:
    """Tabulate one row per arm, with the cosine between its target and the target without noise.

    Args:
        clean: the target without noise.
        epsilons: by private arm, in the order of `targets`.
    """
    table = compare_arms(_rows(evaluations), _rows(measures))
    cosines = {
        arm: target_cosine(clean.read(), noisy.read()) for arm, noisy in zip(epsilons, targets, strict=True)
    }
    return table.assign(epsilon=table["arm"].map(epsilons), target_cosine=table["arm"].map(cosines)), {}


@stage_task("gradients")
def gradients(context: RunContext, paths: list[StageArtifact]) -> Outcome:
    """Tabulate one row per arm, step and part of the parameters."""
    table = gradients_over_seeds(_rows(paths))
    return table, {"arms": int(table["arm"].nunique())}


@stage_task("bounds")
def bounds(context: RunContext, paths: list[StageArtifact]) -> Outcome:
    """Tabulate one row per arm and step."""
    table = bounds_over_seeds(_rows(paths))
    return table, {"arms": int(table["arm"].nunique()), **{n: int(table[n].sum()) for n in ("runs", *HELD)}}


def _rows(artifacts: Iterable[StageArtifact]) -> pd.DataFrame:
    return pd.concat([artifact.read() for artifact in artifacts], ignore_index=True)
