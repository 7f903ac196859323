"""Stage 1: the gradient that the synthetic texts are to match, with noise if the run is private."""

from __future__ import annotations

from gradmm_core.language_model import ModelReference
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.target_gradient import target_gradients
from gradmm_core.target_table import to_table
from gradmm_core.template import ResponseTemplate
from tasks.inputs import read_model, read_split
from tasks.stage import Outcome, RunContext, SplitReference, stage_task


@stage_task("target_gradient")
def target_gradient(
    context: RunContext,
    train: SplitReference,
    model: ModelReference,
    wording: ResponseTemplate,
    settings: TargetGradientSettings,
    clipping_norm: float,
    mechanism: GaussianMechanism | None,
) -> Outcome:
    """Sums the clipped per-example gradients of each class and adds the mechanism's noise, once."""
    attention = "sdpa" if settings.matching == "head" else "eager"
    language_model, template = read_model(context, model, wording, attention)
    data = read_split(context, train)
    target = target_gradients(language_model, template, data, settings, clipping_norm, mechanism)
    figures = {
        "records": {str(label): count for label, count in target.records.items()},
        "text_tokens": {str(label): tokens for label, tokens in target.text_tokens.items()},
        "clip_fraction": target.clip_fraction,
        "sigma": mechanism.sigma if mechanism else None,
    }
    return to_table(target.values), figures
