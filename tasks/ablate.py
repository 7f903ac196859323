"""What each part of the product brings, in one table."""

from __future__ import annotations

import statistics

from gradmm_core.artifacts import StageArtifact
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("ablate")
def ablate(
    context: RunContext,
    arms: list[str],
    generations: list[list[StageArtifact]],
    evaluations: list[StageArtifact],
    measures: list[StageArtifact],
) -> Outcome:
    """One row per version of the recipe, with the mean matching loss and the passes of its generation.

    Args:
        arms: the versions' names, for `generations`: of each, one for every seed.
    """
    import pandas as pd  # late, see tasks/stage.py

    from gradmm_core.compare import compare_arms

    tables = [pd.concat([each.read() for each in part], ignore_index=True) for part in (evaluations, measures)]
    generated = pd.DataFrame(
        [
            {
                "arm": arm,
                "matching_loss": statistics.fmean(each.figures["mean_matching_loss"] for each in made),
                "token_passes": statistics.fmean(each.figures["token_passes_per_text"] for each in made),
            }
            for arm, made in zip(arms, generations, strict=True)
        ]
    )
    return compare_arms(*tables).merge(generated, on="arm", how="left", validate="one_to_one"), {}
