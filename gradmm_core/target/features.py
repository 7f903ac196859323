"""Compute a text's features for the linear probe from a language model's hidden states.

The features are the means, over the text's own tokens, of the embeddings and of the middle and the last layer's
hidden states. The response's gradient depends on the text through one position; the features depend on all of it.
Public texts determine the map: features are centred, whitened in their leading directions (so that noise affects
all directions equally) and clipped to norm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradmm.errors import InputError
from gradmm.gradients.head_gradient import products_one_by_one
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate, length_bucketed, make_batch
from gradmm.privacy.sensitivity import CONSTANT

#: Whitening adds this share of the mean variance to each direction's variance, so that it does not amplify
#: directions in which public texts hardly differ.
RIDGE = 0.1


def text_means(
    layers: Sequence[Float[Tensor, "batch tokens _"]], of_text: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch width"]:
    """Average each layer over each text's own tokens and concatenate, in at least float32. Differentiable."""
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    weights = of_text.to(dtype)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return torch.cat([torch.einsum("bt,bth->bh", weights, layer.to(dtype)) for layer in layers], dim=1)


def means_in_batches(
    language_model: LanguageModel, template: TokenisedTemplate, texts: Sequence[list[int]], batch_size: int
) -> Iterator[tuple[list[int], Float[Tensor, "batch width"]]]:
    """Compute `text_means` of texts given as token ids, without prefix and suffix, in batches of similar length.

    Yields the numbers of a batch's texts with their means.
    """
    any_label = template.labels[0]
    for rows in length_bucketed([len(text) for text in texts], batch_size):
        batch = make_batch(template, [texts[row] for row in rows], [any_label] * len(rows), language_model.device)
        yield rows, text_means(language_model.layers(input_ids=batch.input_ids), batch.text_mask)


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """The feature map phi(text) = map (means - mean), clipped to norm 1."""

    mean: Float[Tensor, " width"]
    map: Float[Tensor, "dimensions width"]

    @classmethod
    def of_public(cls, means: Float[Tensor, "texts width"], dimensions: int) -> TextFeatures:
        """Fit the map to public texts, in at most `dimensions` of their leading directions.

        The map is scaled so that the median norm of the public texts' features is 1 before clipping.

        Raises:
            InputError: if the means are not finite, or the same for all texts.
        """
        means = means.double()
        if not means.isfinite().all():
            fix = "set model.dtype=float32, or use another model"
            raise InputError("hidden states of the model's own text are not finite", "target_space", fix)
        mean = means.mean(dim=0)
        scale = (means - mean).std(dim=0, correction=0)
        if not scale.any():
            fix = "set target_gradient.probe_share=0"
            raise InputError("the model's own texts are all the same", "target_space", fix)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        standard = (means - mean) / scale
        variances, directions = torch.linalg.eigh(standard.mT @ standard / len(means))  # ascending
        count = min(dimensions, len(means) - 1, int((variances > 1e-9 * variances[-1]).sum()))
        variances, directions = variances[-count:].flip(0), directions[:, -count:].flip(1)
        whitening = (directions / (variances + RIDGE * variances.mean()).sqrt()).mT / scale
        return cls(mean, whitening / ((means - mean) @ whitening.mT).norm(dim=1).median())

    def __call__(self, means: Float[Tensor, "batch width"]) -> Float[Tensor, "batch dimensions"]:
        """Map the texts' `text_means` to features of norm at most 1, in the same dtype. Differentiable."""
        centred = (means - self.mean.to(means))[:, None]
        mapped = products_one_by_one(centred, self.map.to(means).mT)[:, 0]
        return mapped / mapped.norm(dim=1, keepdim=True).clamp_min(1.0)

    def with_constant(self, means: Float[Tensor, "batch width"]) -> Float[Tensor, "batch dimensions_and_one"]:
        """Compute x = (phi, CONSTANT) / sqrt(1 + CONSTANT^2) for each text, of norm at most 1, in float64."""
        features = self(means.double())
        constant = features.new_full((len(features), 1), CONSTANT)
        return torch.cat([features, constant], dim=1) / (1 + CONSTANT**2) ** 0.5
