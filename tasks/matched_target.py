"""What the texts of one class are to match, from the stages that made it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradmm_core.artifacts import StageArtifact
from gradmm_core.probe import Probe, fit_probe
from gradmm_core.release_norms import ReleaseNorms
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.target_space import TargetSpace, difference_trust, from_table
from gradmm_core.target_table import matrix_of, moments_of
from gradmm_core.template import TokenisedTemplate
from gradmm_core.text_features import TextFeatures


class MatchedTarget(NamedTuple):
    """`trust` is what the target is trusted beside its public centre; None where it is matched as it is."""

    target: Tensor
    space: TargetSpace
    trust: float | None


def matched_target(
    target: StageArtifact,
    space: StageArtifact | None,
    template: TokenisedTemplate,
    matching: TargetGradientSettings,
    label: int,
    records: float | None,
    clipping_norm: float,
    device: torch.device,
) -> MatchedTarget:
    """The target, and the space that a text's gradient has to be taken to.

    Args:
        records: how many the class has, as far as that may be known: None unless the target is matched as a mean.
        clipping_norm: of the release as a whole.
    """
    released = matrix_of(target.read_table(), label)
    where = from_table(space and space.read_table(), template, matching, device)
    if space is None or records is None:
        return MatchedTarget(released, where, None)
    norm = ReleaseNorms.of(clipping_norm, matching.probe_share).gradient
    trust = difference_trust(released, records, norm, target.figures["sigma"] or 0.0)
    clip_scale = space.figures["clip_scale"][str(label)]
    mean = where.mean_gradient(released.to(device), label, records, clip_scale, trust)
    return MatchedTarget(mean, where.without_centres(), trust)


def released_probe(
    target: StageArtifact, features: TextFeatures | None, template: TokenisedTemplate
) -> Probe | None:
    """The probe that was released with the target, if one was; `features` are its space's."""
    if features is None:
        return None
    noise = (target.figures["class_sum_noise"], target.figures["second_moment_noise"])
    return fit_probe(features, moments_of(target.read_table(), template.labels, noise))
