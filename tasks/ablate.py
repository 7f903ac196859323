"""What each part of the product brings, in one table."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("ablate")
def ablate(
    context: RunContext,
    arms: list[str],
    generations: list[StageArtifact],
    evaluations: list[StageArtifact],
    measures: list[StageArtifact],
) -> Outcome:
    """One row per version of the recipe, with the mean matching loss and the passes of its generation.

    Args:
        arms: the versions' names, for `generations`.
    """
    import pandas as pd  # late, see tasks/stage.py

    from gradmm_core.compare import compare_arms

    tables = [pd.concat([each.read() for each in part], ignore_index=True) for part in (evaluations, measures)]
    generated = pd.DataFrame(
        [
            {
                "arm": arm,
                "matching_loss": made.figures["mean_matching_loss"],
                "token_passes": made.figures["token_passes_per_text"],
            }
            for arm, made in zip(arms, generations, strict=True)
        ]
    )
    return compare_arms(*tables).merge(generated, on="arm", how="left", validate="one_to_one"), {}
