"""What the texts of one class are to match, from the stages that made it."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmm_core.artifacts import StageArtifact
from gradmm_core.probe import Probe, fit_probe
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.target_space import TargetSpace, from_table
from gradmm_core.target_table import matrix_of, moments_of
from gradmm_core.template import TokenisedTemplate
from gradmm_core.text_features import TextFeatures


def matched_target(
    target: StageArtifact,
    space: StageArtifact | None,
    template: TokenisedTemplate,
    matching: TargetGradientSettings,
    label: int,
    records: float | None,
    device: torch.device,
) -> tuple[Tensor, TargetSpace]:
    """The target, and the space that a text's gradient has to be taken to.

    Args:
        records: how many the class has, as far as that may be known: None unless the target is matched as a mean.
    """
    matched = matrix_of(target.read_table(), label)
    where = from_table(space and space.read_table(), template, matching, device)
    if space and records is not None:
        clip_scale = space.figures["clip_scale"][str(label)]
        matched = where.mean_gradient(matched.to(device), label, records, clip_scale)
        where = where.without_centres()
    return matched, where


def released_probe(
    target: StageArtifact, features: TextFeatures | None, template: TokenisedTemplate
) -> Probe | None:
    """The probe that was released with the target, if one was; `features` are its space's."""
    if features is None:
        return None
    noise = (target.figures["class_sum_noise"], target.figures["second_moment_noise"])
    return fit_probe(features, moments_of(target.read_table(), template.labels, noise))
