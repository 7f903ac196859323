"""A linear probe: what the hidden states of a text say of its class, once real records have been seen.

Linear discriminant analysis needs of the records nothing but sums: how many each class has, the sum of their
features, and one second moment of all. These are released with the target, in the same noisy vector. All that
follows is post-processing:

    m_c    class means, from sums and counts
    S      the covariance within classes, mixed with that of public text (1/k in each of k directions) as if k more
           records had it, and raised where its eigenvalues are no more than noise
    trust  the part of the means' spread that is not what noise and few records would have spread them by
           (James and Stein's estimator, in the metric of S): a probe of nothing but noise is none

With the means' own mean m and d_c = trust (m_c - m), its logits are d_c^T S^-1 (phi - m) - d_c^T S^-1 d_c / 2.
Second moments for private regression: McSherry and Mironov (2009); Wang (2018) adds to them what their noise asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm_core.language_model import LanguageModel
from gradmm_core.release_norms import CONSTANT
from gradmm_core.template import TokenisedTemplate, length_bucketed, make_batch
from gradmm_core.text_features import TextFeatures, text_means


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over records of x = (phi, CONSTANT) / sqrt(1 + CONSTANT^2), and of x x^T; float64.

    Attributes:
        class_sums: by label.
        second_moment: of all classes' records together; not symmetric where noise was added.
        class_sum_noise, second_moment_noise: standard deviation of the noise in each number; zero without noise.
    """

    class_sums: dict[int, Float[Tensor, " dimensions_and_one"]]
    second_moment: Float[Tensor, "dimensions_and_one dimensions_and_one"]
    class_sum_noise: float = 0.0
    second_moment_noise: float = 0.0


@dataclass(frozen=True, eq=False)
class Probe:
    """Softmax of `features(text) @ weights + biases`; columns are classes, in the order of the labels."""

    features: TextFeatures
    labels: list[int]
    weights: Float[Tensor, "dimensions classes"]
    biases: Float[Tensor, " classes"]
    trust: float

    def log_probabilities(self, means: Float[Tensor, "batch width"]) -> Float[Tensor, "batch classes"]:
        """log p(class | text), in nats, of texts by their `text_means`. Differentiable."""
        return (self.features(means) @ self.weights.to(means) + self.biases.to(means)).log_softmax(dim=1)

    def losses(self, means: Float[Tensor, "batch width"], label: int) -> Float[Tensor, " batch"]:
        """-log p(label | text)."""
        return -self.log_probabilities(means)[:, self.labels.index(label)]

    @torch.no_grad()
    def judge(
        self,
        language_model: LanguageModel,
        template: TokenisedTemplate,
        texts: Sequence[list[int]],
        batch_size: int = 64,
    ) -> Float[Tensor, "texts classes"]:
        """`log_probabilities` of texts as token ids, without prefix and suffix; in their order, on the CPU."""
        judged = torch.zeros(len(texts), len(self.labels))
        for rows in length_bucketed([len(text) for text in texts], batch_size):
            chosen = [texts[row] for row in rows]
            batch = make_batch(template, chosen, [self.labels[0]] * len(chosen), language_model.device)
            means = text_means(language_model.layers(input_ids=batch.input_ids), batch.text_mask)
            judged[rows] = self.log_probabilities(means).to(judged)
        return judged


def fit_probe(features: TextFeatures, moments: Moments) -> Probe:
    """The probe that follows from moments, noisy ones or not."""
    squared = 1 + CONSTANT**2
    sums = torch.stack(list(moments.class_sums.values())) * math.sqrt(squared)
    counts = (sums[:, -1] / CONSTANT).clamp_min(1.0)  # noise can take a count below one
    total = counts.sum()
    means, shares = sums[:, :-1] / counts[:, None], counts / total
    second = squared * (moments.second_moment + moments.second_moment.mT)[:-1, :-1] / 2
    dimensions = len(second)

    within = second / total - (means.mT * shares) @ means
    within = (total * within + torch.eye(dimensions).to(within)) / (total + dimensions)
    # The spectral norm of symmetric noise, with variance sd^2 / 2 off the diagonal. Without noise no eigenvalue is
    # below what public text gives.
    noise = math.sqrt(2 * dimensions) * squared * moments.second_moment_noise / float(total)
    values, vectors = torch.linalg.eigh(within)
    inverse = (vectors / values.clamp_min(max(noise, 1 / float(total + dimensions)))) @ vectors.mT

    middle = shares @ means
    centred = means - middle
    spread = (shares * ((centred @ inverse) * centred).sum(dim=1)).sum()
    of_noise = squared * moments.class_sum_noise**2 / counts.square() * inverse.trace() + dimensions / counts
    trust = float((1 - (shares * (1 - shares) * of_noise).sum() / spread).clamp(0.0, 1.0).nan_to_num(0.0))
    weights = trust * (inverse @ centred.mT)
    biases = -trust / 2 * (centred * weights.mT).sum(dim=1) - middle @ weights
    return Probe(features, list(moments.class_sums), weights, biases, trust)
