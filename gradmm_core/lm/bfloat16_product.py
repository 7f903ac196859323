"""Product h M^T with a frozen matrix M of the head's size, in bfloat16 with nearly float32 accuracy.

If the body runs in bfloat16, its hidden states and the head's weights are bfloat16 too. Their product in bfloat16
then loses accuracy only when the result is rounded to 8 bits. A second bfloat16 product computes the remainder
`h M^T - rounded`, which adds 8 bits: the sum has a relative error of about 2^-17, against 2^-9 for the body's own
rounding. With hardware support for bfloat16, two such products take half the time of one in float32.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

#: Maximum error of two products, relative to the largest entry. The error of a single product is 2^-9.
TOLERANCE = 2**-14

#: Columns that a GPU's fast products take: of another width, a product of bfloat16 takes four times as long.
ALIGNMENT = 8


class FrozenProduct:
    """Multiply by a frozen matrix M: h M^T, differentiable in h.

    Args:
        matrix: M in the head's dtype. It is rounded to bfloat16 for a bfloat16 body, which is exact for a head
            loaded in bfloat16.
        body_dtype: dtype in which h was computed.
    """

    def __init__(self, matrix: Float[Tensor, "rows width"], body_dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._body_dtype = body_dtype

    def __call__(self, h: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch rows"]:
        half = self._half
        if half is None:
            return h @ self._matrix.mT
        products = _TwoProducts.apply(_padded(h.flatten(0, -2)), half)
        return products.view(*h.shape[:-1], len(half))  # pyright: ignore[reportOptionalMemberAccess]

    @cached_property
    def _half(self) -> Float[Tensor, "rows padded"] | None:
        """M in bfloat16, if the body is bfloat16 and two products are accurate on this device. Else None."""
        if self._body_dtype != torch.bfloat16:
            return None
        half = _padded(self._matrix.to(self._body_dtype))
        sample = half[:64]
        exact = sample.double() @ sample.double().mT
        error = (_two_products(sample, sample).double() - exact).abs().max()
        return half if error <= TOLERANCE * exact.abs().max() else None


def _padded(matrix: Float[Tensor, "rows width"]) -> Float[Tensor, "rows padded"]:
    """Append zeros up to a multiple of `ALIGNMENT` columns: a head with a bias has one column too many."""
    return nn.functional.pad(matrix, (0, -matrix.shape[1] % ALIGNMENT))


class _TwoProducts(torch.autograd.Function):
    """Compute the gradient in half precision, the precision of the body."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, half: Tensor) -> Tensor:
        ctx.save_for_backward(half)
        ctx.dtype = h.dtype
        return _two_products(h.to(half.dtype), half)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (half,) = ctx.saved_tensors
        return (slope.to(half.dtype) @ half).to(ctx.dtype), None


def _two_products(h: Tensor, half: Tensor) -> Tensor:
    rounded = h @ half.mT
    return rounded.float() + torch.addmm(rounded, h, half.mT, beta=-1)
