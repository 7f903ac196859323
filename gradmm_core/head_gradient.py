"""The gradient of the response loss with respect to the output head, in closed form.

For one example, let h_t be the last hidden state at the position that predicts response token y_t (with a
one appended where the head has a bias), z_t the logits there, and r_t = softmax(z_t) - onehot(y_t). The mean
cross-entropy over the m response tokens has the head gradient

    g = (1/m) sum_t r_t h_t^T,        a vocab x width matrix of rank at most m.

Everything that GRADMM (Nguyen et al., ICML 2025, eq. 6-8) needs of g is an inner product, a norm or a sum over
examples, and each follows from the two factors without building g. The result is differentiable by one ordinary
backward pass through the model's body, where the published code differentiates twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradmm_core.matching_loss import matching_loss
from gradmm_core.settings import MatchingLoss


@dataclass(frozen=True)
class HeadGradients:
    """Per-example head gradients of a batch, g_i = sum_t residual[i, t] hidden[i, t]^T - centre, kept as factors.

    `residual` carries the factor 1/m, and is zero at padded response positions, so that examples with
    different response lengths share a batch. `centre` is one matrix for all, or None for zero.
    """

    residual: Float[Tensor, "batch response vocab"]
    hidden: Float[Tensor, "batch response width"]
    centre: Float[Tensor, "vocab width"] | None = None

    @classmethod
    def from_logits(
        cls,
        logits: Float[Tensor, "batch response vocab"],
        hidden: Float[Tensor, "batch response width"],
        response_ids: Int[Tensor, "batch response"],
        response_mask: Bool[Tensor, "batch response"],
    ) -> HeadGradients:
        """Gradients from the logits and hidden states at the positions that predict the response.

        Args:
            hidden: with a column of ones if the head has a bias; `width` is then d + 1, else d.
            response_mask: false at padding; every example has at least one true entry.
        """
        probabilities = torch.softmax(logits, dim=-1)
        minus_one = torch.full_like(response_ids[..., None], -1, dtype=logits.dtype)
        weight = response_mask.to(logits.dtype)
        weight = weight / weight.sum(dim=1, keepdim=True)
        residual = probabilities.scatter_add(-1, response_ids[..., None], minus_one).mul_(weight[..., None])
        return cls(residual, hidden)

    def inner_products(
        self, target: Float[Tensor, "vocab width"], of_hidden: Float[Tensor, "batch response vocab"] | None = None
    ) -> Float[Tensor, " batch"]:
        """<g_i, G> = sum_t r_t^T G h_t - <centre, G> for each example.

        Args:
            of_hidden: the products G h_t, where they are at hand.
        """
        products = self._factor_products(target, of_hidden)
        return products if self.centre is None else products - (self.centre * target).sum()

    def _factor_products(
        self, matrix: Float[Tensor, "vocab width"], of_hidden: Float[Tensor, "batch response vocab"] | None = None
    ) -> Float[Tensor, " batch"]:
        if of_hidden is None:
            of_hidden = self.hidden @ matrix.mT
        return (self.residual * of_hidden).sum(dim=(1, 2))

    def norms(self) -> Float[Tensor, " batch"]:
        """Frobenius norms."""
        return self.squared_norms().sqrt()

    def squared_norms(self) -> Float[Tensor, " batch"]:
        """||g||^2 = sum_{s,t} (r_s . r_t)(h_s . h_t), and the centre's part of it."""
        gram = (self.residual @ self.residual.mT) * (self.hidden @ self.hidden.mT)
        squares = gram.sum(dim=(1, 2))
        if self.centre is not None:
            squares = squares - 2 * self._factor_products(self.centre) + self.centre.square().sum()
        # Rounding can take a vanishing norm below zero; the floor also keeps sqrt's gradient finite at zero.
        return squares.clamp_min(torch.finfo(gram.dtype).tiny)

    def gram(self) -> Float[Tensor, "batch batch"]:
        """<g_i, g_j> for every pair: sum_{s,t} (r_is . r_jt)(h_is . h_jt), and the centre's part of it."""
        batch, response = self.residual.shape[:2]
        residual, hidden = self.residual.flatten(0, 1), self.hidden.flatten(0, 1)
        pairs = (residual @ residual.mT) * (hidden @ hidden.mT)
        gram = pairs.view(batch, response, batch, response).sum(dim=(1, 3))
        if self.centre is None:
            return gram
        to_centre = self._factor_products(self.centre)
        return gram - to_centre[:, None] - to_centre + self.centre.square().sum()

    def matching_losses(
        self,
        target: Float[Tensor, "vocab width"],
        loss: MatchingLoss = "cosine",
        of_hidden: Float[Tensor, "batch response vocab"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """How far each g_i is from G, as `matching_loss` has it. `of_hidden`: see `inner_products`."""
        products = self.inner_products(target, of_hidden)
        return matching_loss(loss, products, self.squared_norms(), target.square().sum())

    def clip_scales(self, clipping_norm: float | None) -> Float[Tensor, " batch"]:
        """min(1, C / ||g_i||): what brings each gradient's norm to at most C. `None` clips nothing."""
        norms = self.norms()
        if clipping_norm is None:
            return torch.ones_like(norms)
        return (clipping_norm / norms).clamp_max(1.0)

    def clipped_sum(self, clipping_norm: float | None) -> Float[Tensor, "vocab width"]:
        """sum_i min(1, C / ||g_i||) g_i, one matrix product over all examples.

        Formal guarantee: adding or removing one example changes the result by at most C in Frobenius norm
        (up to rounding); replacing one, by at most 2 C.
        """
        scales = self.clip_scales(clipping_norm)
        scaled = self.residual * scales[:, None, None]
        total = scaled.flatten(0, 1).mT @ self.hidden.flatten(0, 1)
        return total if self.centre is None else total - scales.sum() * self.centre

    def materialise(self) -> Float[Tensor, "batch vocab width"]:
        """The gradients as matrices. For tests and small models: this is what all else avoids."""
        gradients = self.residual.mT @ self.hidden
        return gradients if self.centre is None else gradients - self.centre

    def double(self) -> HeadGradients:
        """In float64: what clips must not be off by a rounding error of the norm."""
        centre = None if self.centre is None else self.centre.double()
        return HeadGradients(self.residual.double(), self.hidden.double(), centre)
