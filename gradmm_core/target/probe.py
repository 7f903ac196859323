"""Fit a linear probe that predicts a text's class from its hidden states, from the released sums over records.

Linear discriminant analysis needs only sums over the records: each class's count, the sum of its features, and one
second moment of all records. They are released with the target, in the same noisy vector. The fit is
post-processing:

    m_c        class means, from sums and counts
    S          the covariance within classes, mixed with that of public text (1/k in each of k directions) as if k
               more records had it; eigenvalues below the level of the noise are raised to it. If no second moment
               was released, that of public text alone
    shrinkage  for each class, the share of its mean's squared distance from the others' that is expected not to be
               by noise and sampling: tau / (tau + chance), in the metric of S, with one prior variance tau of the
               class means that is estimated from all classes (Efron and Morris, 1975). 0 for pure noise; for two
               classes the positive part of James and Stein's estimator

With the mean m of the class means, weighted by the counts, and d_c = shrinkage_c (m_c - m), the logits are
d_c^T S^-1 (phi - m) - d_c^T S^-1 d_c / 2. Second moments for private regression are due to McSherry and Mironov
(2009); Wang (2018) regularises them by the level of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate
from gradmm.privacy.sensitivity import CONSTANT
from gradmm.target.features import TextFeatures, means_in_batches


class ClassMeans(NamedTuple):
    """Means of the features and numbers of records of each class, in the order of the labels.

    Attributes:
        counts: at least 1, and at least twice their noise's standard deviation, since noise can take a count far
            below its class's records, and the means divide by it.
        sum_noise, count_noise: standard deviation of the noise in each entry of a class's sum of features, and in
            its count.
    """

    means: Float[Tensor, "classes dimensions"]
    counts: Float[Tensor, " classes"]
    sum_noise: float
    count_noise: float


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over records of x = (phi, CONSTANT) / sqrt(1 + CONSTANT^2), and of x x^T; float64.

    Attributes:
        class_sums: sums of x, by label.
        second_moment: sum of x x^T over all classes; not symmetric if noise was added. None if not released.
        class_sum_noise, second_moment_noise: standard deviation of the noise in each entry; zero without noise.
    """

    class_sums: dict[int, Float[Tensor, " dimensions_and_one"]]
    second_moment: Float[Tensor, "dimensions_and_one dimensions_and_one"] | None
    class_sum_noise: float = 0.0
    second_moment_noise: float = 0.0

    def class_means(self) -> ClassMeans:
        """Divide the sums of the features by the counts."""
        scale = math.sqrt(1 + CONSTANT**2)
        sums = torch.stack(list(self.class_sums.values())) * scale
        noise = self.class_sum_noise * scale
        counts = (sums[:, -1] / CONSTANT).clamp_min(max(1.0, 2 * noise / CONSTANT))
        return ClassMeans(sums[:, :-1] / counts[:, None], counts, noise, noise / CONSTANT)


@dataclass(frozen=True, eq=False)
class Probe:
    """Softmax of `features(text) @ weights + biases`, with one column per class in the order of `labels`.

    Attributes:
        shrinkage: the mean of the classes' factors, weighted by their counts.
    """

    features: TextFeatures
    labels: list[int]
    weights: Float[Tensor, "dimensions classes"]
    biases: Float[Tensor, " classes"]
    shrinkage: float

    def log_probabilities(self, means: Float[Tensor, "batch width"]) -> Float[Tensor, "batch classes"]:
        """Compute log p(class | text), in nats, from texts' `text_means`. Differentiable."""
        return self.of_features(self.features(means))

    def of_features(self, features: Float[Tensor, "batch dimensions"]) -> Float[Tensor, "batch classes"]:
        """Compute log p(class | text), in nats, from texts' features. Differentiable."""
        return (features @ self.weights.to(features) + self.biases.to(features)).log_softmax(dim=1)

    def losses(self, means: Float[Tensor, "batch width"], label: int) -> Float[Tensor, " batch"]:
        """Compute -log p(label | text), in nats, from texts' `text_means`. Differentiable."""
        return -self.log_probabilities(means)[:, self.labels.index(label)]

    @torch.no_grad()
    def classify(
        self,
        language_model: LanguageModel,
        template: TokenisedTemplate,
        texts: Sequence[list[int]],
        batch_size: int = 64,
    ) -> Float[Tensor, "texts classes"]:
        """Compute `log_probabilities` of texts given as token ids, without prefix and suffix; on the CPU."""
        log_probabilities = torch.zeros(len(texts), len(self.labels))
        for rows, means in means_in_batches(language_model, template, texts, batch_size):
            log_probabilities[rows] = self.log_probabilities(means).to(log_probabilities)
        return log_probabilities


def fit_probe(features: TextFeatures, moments: Moments) -> Probe:
    """Fit the probe to moments, with or without noise."""
    class_means = moments.class_means()
    means, counts, sum_noise, _ = class_means
    dimensions = means.shape[1]
    shares = counts / counts.sum()
    inverse = _inverse_covariance(moments, class_means)
    mean = shares @ means
    centred = means - mean
    spreads = ((centred @ inverse) * centred).sum(dim=1)
    of_means = (sum_noise / counts).square() * inverse.trace() + dimensions / counts
    # Each of `centred` is a sum of the means, with the square roots of these factors.
    factors = (torch.eye(len(shares)).to(shares) - shares).square()
    by_chance, of_unit_means = factors @ of_means, factors.sum(dim=1)
    # A class with much noise counts for little in the prior.
    prior = ((spreads / by_chance - 1).sum() / (of_unit_means / by_chance).sum()).clamp_min(0.0)
    shrinkages = prior * of_unit_means / (prior * of_unit_means + by_chance)
    weights = shrinkages * (inverse @ centred.mT)
    biases = -shrinkages / 2 * (centred * weights.mT).sum(dim=1) - mean @ weights
    return Probe(features, list(moments.class_sums), weights, biases, float(shares @ shrinkages))


def _inverse_covariance(moments: Moments, class_means: ClassMeans) -> Float[Tensor, "dimensions dimensions"]:
    """Invert the covariance within classes: of the records and public text, or of public text alone."""
    means, counts, _, _ = class_means
    dimensions = means.shape[1]
    one = torch.eye(dimensions).to(means)
    if moments.second_moment is None:
        return dimensions * one
    squared = 1 + CONSTANT**2
    total = counts.sum()
    second = squared * (moments.second_moment + moments.second_moment.mT)[:-1, :-1] / 2
    within = second / total - (means.mT * (counts / total)) @ means
    within = (total * within + one) / (total + dimensions)
    # The spectral norm of symmetric noise with variance sd^2 / 2 off the diagonal. Without noise, the share of
    # public text bounds the eigenvalues from below.
    noise = math.sqrt(2 * dimensions) * squared * moments.second_moment_noise / float(total)
    values, vectors = torch.linalg.eigh(within)
    return (vectors / values.clamp_min(max(noise, 1 / float(total + dimensions)))) @ vectors.mT
