"""Lower each class's mean matching loss to that of the best class, as far as the floor allows."""

from __future__ import annotations

from gradmm.config.settings import CategoryBalanceSettings
from gradmm.filters.category_balance import balance_categories
from gradmm.filters.rows import filter_figures, kept_texts
from gradmm.storage.artifacts import StageArtifact
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("category_balance")
def category_balance(context: RunContext, texts: StageArtifact, settings: CategoryBalanceSettings) -> Outcome:
    """Drop the worst texts of the worse classes."""
    balanced = balance_categories(kept_texts(texts.read()), settings)
    return balanced, filter_figures(balanced)
