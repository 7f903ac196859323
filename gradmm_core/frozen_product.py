"""h M^T for a frozen matrix M as large as the head, in half precision and nearly as exact as in float32.

Where the body is in bfloat16, so are the hidden states that leave it and the weights of the head, and a product of
the two in bfloat16 loses nothing but in rounding its result, to 8 bits. What it lost is itself a product in
bfloat16, `h M^T - rounded`, which is small and keeps 8 bits more: the sum of both is off by some 2^-17, where the
body's own rounding is off by 2^-9. Where processors have bfloat16 arithmetic, the two take half the time of one
product in float32.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

#: Of the largest entry: what two products may be off by. One alone is off by 2^-9.
TOLERANCE = 2**-14


class FrozenProduct:
    """A matrix M to multiply with: h M^T, differentiable in h.

    Args:
        matrix: in the head's dtype. In a half precision it is rounded to it, which changes nothing of a head that
            was loaded so.
        body_dtype: of what h was computed in.
    """

    def __init__(self, matrix: Float[Tensor, "rows width"], body_dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._body_dtype = body_dtype

    def __call__(self, h: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch rows"]:
        half = self._half
        if half is None:
            return h @ self._matrix.mT
        products = _TwoProducts.apply(h.flatten(0, -2), half)
        return products.view(*h.shape[:-1], len(half))  # pyright: ignore[reportOptionalMemberAccess]

    @cached_property
    def _half(self) -> Float[Tensor, "rows width"] | None:
        """M in bfloat16, if the body is too and if two products come out on this device as they should."""
        if self._body_dtype != torch.bfloat16:
            return None
        half = self._matrix.to(self._body_dtype)
        some = half[:64]
        exact = some.double() @ some.double().mT
        off = (_two_products(some, some).double() - exact).abs().max()
        return half if off <= TOLERANCE * exact.abs().max() else None


class _TwoProducts(torch.autograd.Function):
    """Backward in half precision: the body takes the gradient so anyway."""

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
