"""What the noise of each epsilon costs, in one table."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("epsilon")
def epsilon(
    context: RunContext,
    clean: StageArtifact,
    epsilons: dict[str, float],
    targets: list[StageArtifact],
    evaluations: list[StageArtifact],
    measures: list[StageArtifact],
) -> Outcome:
    """One row per arm, with the cosine of its target and the one without noise.

    Args:
        epsilons: of the arms with a guarantee, by name, in the order of `targets`.
    """
    # Late, see tasks/stage.py.
    import pandas as pd

    from gradmm_core.compare import compare_arms
    from gradmm_core.target_cosine import target_cosine

    tables = [pd.concat([each.read() for each in part], ignore_index=True) for part in (evaluations, measures)]
    table = compare_arms(*tables)
    cosines = {
        arm: target_cosine(clean.read(), noisy.read()) for arm, noisy in zip(epsilons, targets, strict=True)
    }
    return table.assign(epsilon=table["arm"].map(epsilons), target_cosine=table["arm"].map(cosines)), {}
