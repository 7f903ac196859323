"""Read the target that one class's texts have to match, and what else was released, from the stages' outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradmm.config.settings import TargetGradientSettings
from gradmm.lm.template import TokenisedTemplate
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.storage.artifacts import StageOutput
from gradmm.target.features import TextFeatures
from gradmm.target.naive_bayes import NaiveBayes, fit_naive_bayes
from gradmm.target.probe import Moments, Probe, fit_probe
from gradmm.target.tables import matrix_of, moments_of, token_sums_of
from gradmm.target.target_space import (
    TargetSpace,
    difference_shrinkage,
    frequencies_from_table,
    from_table,
)
from gradmm.target.token_rates import TokenSums


class MatchedTarget(NamedTuple):
    """A class's target and the space it is in.

    `shrinkage` is the factor of the released difference from the public centre; None if the target is matched as
    released.
    """

    target: Tensor
    space: TargetSpace
    shrinkage: float | None


def matched_target(
    target: StageOutput,
    space: StageOutput | None,
    template: TokenisedTemplate,
    matching: TargetGradientSettings,
    label: int,
    records: float | None,
    clipping_norm: float,
    device: torch.device,
) -> MatchedTarget:
    """Return the target, and the space that texts' gradients are projected to.

    Args:
        records: the class's number of records, as declared in a private run; None unless a mean is matched.
        clipping_norm: of the whole release.
    """
    released = matrix_of(target.read_table(), label)
    where = from_table(space and space.read_table(), template, matching, device)
    if space is None or records is None:
        return MatchedTarget(released, where, None)
    norm = ReleaseNorms.of_target(clipping_norm, matching).gradient
    shrinkage = difference_shrinkage(released, records, norm, target.figures["sigma"] or 0.0)
    clip_scale = space.figures["clip_scale"][str(label)]
    mean = where.mean_gradient(released.to(device), label, records, clip_scale, shrinkage)
    return MatchedTarget(mean, where.without_centres(), shrinkage)


def released_probe(
    target: StageOutput, features: TextFeatures | None, template: TokenisedTemplate
) -> Probe | None:
    """Fit the probe that was released with the target; None without `features`, which come from its space."""
    return None if features is None else fit_probe(features, released_moments(target, template))


def released_moments(target: StageOutput, template: TokenisedTemplate) -> Moments:
    """Read the sums over the records that were released with the target for a probe."""
    noise = (target.figures["class_sum_noise"], target.figures.get("second_moment_noise"))
    return moments_of(target.read_table(), template.labels, noise)


def released_token_sums(target: StageOutput, template: TokenisedTemplate) -> TokenSums:
    """Read the sums of token vectors that were released with the target."""
    return token_sums_of(target.read_table(), template.labels, target.figures["token_sum_noise"])


def released_naive_bayes(
    target: StageOutput,
    space: StageOutput | None,
    template: TokenisedTemplate,
    matching: TargetGradientSettings,
) -> NaiveBayes | None:
    """Fit the naive Bayes classifier to the token rates that were released with the target; None without any."""
    if space is None or matching.token_share == 0:
        return None
    frequencies = frequencies_from_table(space.read_table())
    assert frequencies is not None  # the stage target_space writes them for every release with token rates
    return fit_naive_bayes(released_token_sums(target, template), frequencies)
