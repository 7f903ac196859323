"""Linear probes: what a softmax on a model's hidden states takes a text for, once it has seen real rows.

A probe sees more of a text than the gradient at the response does: the mean over the text's own tokens of the
embeddings, of the middle layer's hidden states and of the last one's. It is fitted without noise, or by gradient
descent on noisy sums: every step releases one sum of the records' clipped gradients, and Gaussian noise that is
sqrt(steps) times as large as for one release gives all of them together the guarantee of that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression

from gradmm_core.language_model import LanguageModel
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.template import length_bucketed

BATCH_SIZE = 128


@dataclass(frozen=True)
class TextFeatures:
    """Standardised by texts that are not private, and clipped to a norm of 1."""

    mean: Float[NDArray, " dimensions"]
    scale: Float[NDArray, " dimensions"]
    norm: float

    @classmethod
    def standardised_by(cls, public: Float[NDArray, "texts dimensions"]) -> TextFeatures:
        """`norm` is the median of these texts."""
        mean, scale = public.mean(axis=0), public.std(axis=0)
        return cls(mean, scale, float(np.median(np.linalg.norm((public - mean) / scale, axis=1))))

    def of(self, raw: Float[NDArray, "texts dimensions"]) -> Float[NDArray, "texts dimensions"]:
        """Of `hidden_means`."""
        values = (raw - self.mean) / self.scale / self.norm
        return values / np.maximum(1.0, np.linalg.norm(values, axis=1, keepdims=True))


@torch.no_grad()
def hidden_means(language_model: LanguageModel, texts: Sequence[list[int]]) -> Float[NDArray, "texts dimensions"]:
    """Of each text's token ids, read by itself: three layers side by side."""
    found = [np.empty(0)] * len(texts)
    for rows in length_bucketed([len(text) for text in texts], BATCH_SIZE):
        tokens = [torch.tensor(texts[row]) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(language_model.device)
        lengths = torch.tensor([len(text) for text in tokens], device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        states = language_model.model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        layers = (states[0], states[len(states) // 2], states[-1])
        means = [(layer * mask[..., None]).sum(dim=1) / lengths[:, None] for layer in layers]
        for row, mean in zip(rows, torch.cat(means, dim=1).float().cpu().numpy(), strict=True):
            found[row] = mean
    return np.stack(found)


@dataclass(frozen=True)
class Probe:
    """A softmax without intercepts: what is ranked within a class needs none."""

    weights: Float[NDArray, "dimensions classes"]

    def log_probabilities(self, features: Float[NDArray, "texts dimensions"]) -> Float[NDArray, "texts classes"]:
        return log_softmax(features @ self.weights, axis=1)


def fitted(features: Float[NDArray, "texts dimensions"], columns: Int[NDArray, " texts"]) -> Probe:
    """Logistic regression of scikit-learn; `columns` are the classes, from 0."""
    # What 0.01 is for standardised features: these are shorter by the root of their number.
    model = LogisticRegression(C=0.01 * features.shape[1], max_iter=1000).fit(features, columns)
    weights = model.coef_.T
    return Probe(np.hstack([-weights / 2, weights / 2]) if weights.shape[1] == 1 else weights)


def privately_fitted(
    features: Float[NDArray, "texts dimensions"],
    columns: Int[NDArray, " texts"],
    mechanism: GaussianMechanism,
    steps: int = 16,
    learning_rate: float = 8.0,
    momentum: float = 0.9,
) -> Probe:
    """Under the mechanism's guarantee for all steps together, and the number of records known.

    A record's gradient is its features times what its class's probabilities are off by, a vector with a norm of
    sqrt(2) at most; so that is the sensitivity which `mechanism` has to have.

    Raises:
        ValueError: if the mechanism's is another.
    """
    if not math.isclose(mechanism.sensitivity, math.sqrt(2)):
        raise ValueError(f"the gradients' sensitivity is sqrt(2), the mechanism's {mechanism.sensitivity:g}")
    truth = np.eye(columns.max() + 1)[columns]
    weights = np.zeros((features.shape[1], truth.shape[1]))
    velocity = np.zeros_like(weights)
    for _ in range(steps):
        errors = np.exp(Probe(weights).log_probabilities(features)) - truth
        noisy = features.T @ errors + math.sqrt(steps) * mechanism.noise(weights.shape)
        velocity = momentum * velocity - learning_rate * noisy / len(features)
        weights = weights + velocity
    return Probe(weights)
