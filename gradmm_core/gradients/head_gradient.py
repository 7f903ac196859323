"""Compute the gradient of the response loss with respect to the output head, in closed form.

For one example, let h_t be the last hidden state at the position that predicts response token y_t (with a
one appended where the head has a bias), z_t the logits there, and r_t = softmax(z_t) - onehot(y_t). The mean
cross-entropy over the m response tokens has the head gradient

    g = (1/m) sum_t r_t h_t^T,        a vocab x width matrix of rank at most m.

GRADMM (Nguyen et al., ICML 2025, eq. 6-8) uses g only in inner products, norms and sums over examples. Each of
these follows from the two factors without building g. Its derivative takes one ordinary backward pass through the
model's body; the published code differentiates twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gradmm.config.settings import MatchingLoss
from gradmm.gradients.matching_loss import matching_loss
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import Batch, response_hidden_states


def clip_scales(
    norms: Float[Tensor, " batch"], clipping_norm: float | Float[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Compute min(1, C / norm), the factor that clips each vector to norm C, one for all or each one's own."""
    return (clipping_norm / norms).clamp_max(1.0)


@dataclass(frozen=True)
class HeadGradients:
    """Per-example head gradients of a batch, g_i = sum_t residual[i, t] hidden[i, t]^T - centre, kept as factors.

    `residual` includes the factor 1/m and is zero at padded response positions, so that examples with different
    response lengths share a batch. `centre` is one matrix for all examples; None stands for zero.
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
        """Build gradients from the logits and hidden states at the positions that predict the response.

        Args:
            hidden: ends in a column of ones if the head has a bias; `width` is then d + 1, otherwise d.
            response_mask: false at padding; every example has at least one true entry.
        """
        probabilities = torch.softmax(logits, dim=-1)
        minus_one = torch.full_like(response_ids[..., None], -1, dtype=logits.dtype)
        weight = response_mask.to(logits.dtype)
        weight = weight / weight.sum(dim=1, keepdim=True)
        residual = probabilities.scatter_add(-1, response_ids[..., None], minus_one).mul_(weight[..., None])
        return cls(residual, hidden)

    def inner_products(
        self,
        target: Float[Tensor, "vocab width"],
        hidden_products: Float[Tensor, "batch response vocab"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """Compute <g_i, G> = sum_t r_t^T G h_t - <centre, G> for each example.

        Args:
            hidden_products: the products G h_t, if the caller has computed them.
        """
        products = self._factor_products(target, hidden_products)
        return products if self.centre is None else products - (self.centre * target).sum()

    def _factor_products(
        self,
        matrix: Float[Tensor, "vocab width"],
        hidden_products: Float[Tensor, "batch response vocab"] | None = None,
    ) -> Float[Tensor, " batch"]:
        if hidden_products is None:
            hidden_products = self.hidden @ matrix.mT
        return (self.residual * hidden_products).sum(dim=(1, 2))

    def norms(self) -> Float[Tensor, " batch"]:
        """Compute the Frobenius norms ||g_i||."""
        return self.squared_norms().sqrt()

    def squared_norms(self) -> Float[Tensor, " batch"]:
        """Compute ||g_i||^2; with a zero centre, sum_{s,t} (r_s . r_t)(h_s . h_t)."""
        gram = (self.residual @ self.residual.mT) * (self.hidden @ self.hidden.mT)
        squares = gram.sum(dim=(1, 2))
        if self.centre is not None:
            squares = squares - 2 * self._factor_products(self.centre) + self.centre.square().sum()
        # Rounding can make a vanishing square negative. The floor also keeps sqrt's derivative finite at zero.
        return squares.clamp_min(torch.finfo(gram.dtype).tiny)

    def gram(self) -> Float[Tensor, "batch batch"]:
        """Compute <g_i, g_j> for every pair; with a zero centre, sum_{s,t} (r_is . r_jt)(h_is . h_jt)."""
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
        hidden_products: Float[Tensor, "batch response vocab"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """Compute `matching_loss` between each g_i and G. For `hidden_products` see `inner_products`."""
        products = self.inner_products(target, hidden_products)
        return matching_loss(loss, products, self.squared_norms(), target.square().sum())

    def clip_scales(self, clipping_norm: float | Float[Tensor, " batch"] | None) -> Float[Tensor, " batch"]:
        """Compute min(1, C / ||g_i||), the factor that clips each gradient to norm C; 1 for C = None.

        Args:
            clipping_norm: C, one for all examples or each one's own.
        """
        norms = self.norms()
        return torch.ones_like(norms) if clipping_norm is None else clip_scales(norms, clipping_norm)

    def clipped_sum(self, clipping_norm: float | None) -> Float[Tensor, "vocab width"]:
        """Sum the clipped gradients, sum_i min(1, C / ||g_i||) g_i, by one matrix product over all examples.

        Formal guarantee: adding or removing one example changes the result by at most C in Frobenius norm (up to
        rounding); replacing one changes it by at most 2 C. With C = None nothing is clipped or guaranteed.
        """
        return self.weighted_sum(self.clip_scales(clipping_norm))

    def weighted_sum(self, weights: Float[Tensor, " batch"]) -> Float[Tensor, "vocab width"]:
        """Compute sum_i weights[i] g_i, by one matrix product over all examples."""
        weighted = self.residual * weights[:, None, None]
        total = weighted.flatten(0, 1).mT @ self.hidden.flatten(0, 1)
        return total if self.centre is None else total - weights.sum() * self.centre

    def select(self, examples: Bool[Tensor, " batch"]) -> HeadGradients:
        """Return the gradients of some examples."""
        return HeadGradients(self.residual[examples], self.hidden[examples], self.centre)

    def materialise(self) -> Float[Tensor, "batch vocab width"]:
        """Build the gradients as matrices, of vocab x width numbers each. The other methods avoid this."""
        gradients = self.residual.mT @ self.hidden
        return gradients if self.centre is None else gradients - self.centre

    def double(self) -> HeadGradients:
        """Convert to float64: a norm rounded down in a lower precision would let a clipped gradient exceed C."""
        centre = None if self.centre is None else self.centre.double()
        return HeadGradients(self.residual.double(), self.hidden.double(), centre)


def products_one_by_one(
    batch: Float[Tensor, "batch rows width"], matrix: Float[Tensor, "width columns"]
) -> Float[Tensor, "batch rows columns"]:
    """Multiply each example by a matrix, alone: in one larger product, its bits would depend on its row."""
    return torch.bmm(batch, matrix.expand(len(batch), -1, -1))


def head_gradients(
    language_model: LanguageModel, batch: Batch, hidden: Float[Tensor, "batch tokens hidden"] | None = None
) -> HeadGradients:
    """Compute the head gradients of a batch of examples by one forward pass of the body.

    Args:
        hidden: the last hidden states, if the caller has computed them; the pass is then skipped.
    """
    if hidden is None:
        hidden = language_model.hidden_states(input_ids=batch.input_ids)
    augmented = language_model.augment(response_hidden_states(hidden, batch.positions))
    return HeadGradients.from_logits(
        language_model.logits(augmented), augmented, batch.response_ids, batch.response_mask
    )
