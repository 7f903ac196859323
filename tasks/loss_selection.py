"""Stage 4: keep the texts of each class that match best."""

from __future__ import annotations

from gradmm_core.artifacts import StageArtifact
from gradmm_core.filters import filter_figures, kept_texts
from gradmm_core.loss_selection import select_by_loss
from gradmm_core.settings import LossSelectionSettings
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("loss_selection")
def loss_selection(context: RunContext, texts: StageArtifact, settings: LossSelectionSettings) -> Outcome:
    """Drops duplicates, then keeps the lowest matching losses."""
    ranked = select_by_loss(kept_texts(texts.read()), settings)
    return ranked, filter_figures(ranked, "loss_selection")
