"""What a language model makes of a text, as numbers that a linear probe can be fitted on.

A text's features are the means over its own tokens of the embeddings, of the middle layer's hidden states and of
the last one's. The response's gradient sees the text through one position; these see all of it. Public texts
decide how they are scaled: centred, whitened in their leading directions (so that noise hurts all directions
alike), and no longer than 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gradmm_core.errors import InputError
from gradmm_core.release_norms import CONSTANT

#: Whitening divides by the root of a direction's variance and of this part of the mean one, so that directions in
#: which public texts hardly differ are not blown up.
RIDGE = 0.1


def text_means(
    layers: Sequence[Float[Tensor, "batch tokens _"]], of_text: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch width"]:
    """The layers' means over each text's own tokens, side by side, in float32 at least. Differentiable."""
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    weights = of_text.to(dtype)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return torch.cat([torch.einsum("bt,bth->bh", weights, layer.to(dtype)) for layer in layers], dim=1)


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """phi(text) = map (means - mean), cut to a norm of at most 1."""

    mean: Float[Tensor, " width"]
    map: Float[Tensor, "dimensions width"]

    @classmethod
    def of_public(cls, means: Float[Tensor, "texts width"], dimensions: int) -> TextFeatures:
        """In the leading directions of public texts: as many as asked for, or as these texts have.

        Half of the public texts have a norm of 1 before it is cut.

        Raises:
            InputError: if the model gives texts numbers that are not finite, or all of them the same ones.
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
        """Of `text_means`, in their dtype. Differentiable."""
        mapped = (means - self.mean.to(means)) @ self.map.to(means).mT
        return mapped / mapped.norm(dim=1, keepdim=True).clamp_min(1.0)

    def with_constant(self, means: Float[Tensor, "batch width"]) -> Float[Tensor, "batch dimensions_and_one"]:
        """What a record adds to a class sum: a vector of norm at most 1, in float64, that ends in a constant."""
        features = self(means.double())
        constant = features.new_full((len(features), 1), CONSTANT)
        return torch.cat([features, constant], dim=1) / (1 + CONSTANT**2) ** 0.5
