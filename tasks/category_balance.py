"""Stage 5: let no class match worse than the best one, as far as the floor allows."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from gradmm_core.category_balance import balance_categories
from gradmm_core.filters import filter_figures, kept_texts
from gradmm_core.settings import CategoryBalanceSettings
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("category_balance")
def category_balance(context: RunContext, texts: StageArtifact, settings: CategoryBalanceSettings) -> Outcome:
    """Drops the worst texts of the worse classes."""
    balanced = balance_categories(kept_texts(texts.read()), settings)
    return balanced, filter_figures(balanced, "category_balance")
