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


@dataclass(frozen=True)
class HeadGradients:
    """Per-example head gradients of a batch, g_i = sum_t residual[i, t] hidden[i, t]^T, kept as factors.

    `residual` carries the factor 1/m, and is zero at padded response positions, so that examples with
    different response lengths share a batch.
    """

    residual: Float[Tensor, "batch response vocab"]
    hidden: Float[Tensor, "batch response width"]

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
        onehot = torch.nn.functional.one_hot(response_ids, logits.shape[-1]).to(logits.dtype)
        weight = response_mask.to(logits.dtype)
        weight = weight / weight.sum(dim=1, keepdim=True)
        return cls((probabilities - onehot) * weight[..., None], hidden)

    def inner_products(self, target: Float[Tensor, "vocab width"]) -> Float[Tensor, " batch"]:
        """<g_i, G> = sum_t r_t^T G h_t for each example."""
        return (self.residual * (self.hidden @ target.mT)).sum(dim=(1, 2))

    def norms(self) -> Float[Tensor, " batch"]:
        """Frobenius norms, from ||g||^2 = sum_{s,t} (r_s . r_t)(h_s . h_t)."""
        gram = (self.residual @ self.residual.mT) * (self.hidden @ self.hidden.mT)
        # Rounding can take a vanishing norm below zero; the floor also keeps sqrt's gradient finite at zero.
        smallest = torch.finfo(gram.dtype).tiny
        return gram.sum(dim=(1, 2)).clamp_min(smallest).sqrt()

    def matching_losses(self, target: Float[Tensor, "vocab width"]) -> Float[Tensor, " batch"]:
        """1 - cos(g_i, G), between 0 and 2; it is 1 where g_i or G vanishes."""
        norms = self.norms() * torch.linalg.matrix_norm(target)
        return 1 - self.inner_products(target) / norms.clamp_min(torch.finfo(norms.dtype).tiny)

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
        scaled = self.residual * self.clip_scales(clipping_norm)[:, None, None]
        return scaled.flatten(0, 1).mT @ self.hidden.flatten(0, 1)

    def materialise(self) -> Float[Tensor, "batch vocab width"]:
        """The gradients as matrices. For tests and small models: this is what all else avoids."""
        return self.residual.mT @ self.hidden
