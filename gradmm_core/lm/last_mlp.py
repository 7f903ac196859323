"""The last layer's MLP, restricted to the last positions.

Only the last few hidden states of a free text are used, and no position reads the last layer's MLP at another one.
Computing and differentiating it elsewhere is unnecessary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def only_last(mlp: nn.Module, positions: int) -> Iterator[None]:
    """Compute `mlp` at the last positions only, with zero output elsewhere, while the context is active."""

    length = 0

    def cut(_mlp: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        nonlocal length
        (hidden,) = inputs
        length = hidden.shape[1]
        # A non-contiguous view makes torch compute one small product per text, many times slower.
        return (hidden[:, -positions:].contiguous(),)

    def pad(_mlp: nn.Module, _inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return nn.functional.pad(output, (0, 0, length - positions, 0))

    hooks = [mlp.register_forward_pre_hook(cut), mlp.register_forward_hook(pad)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(body: Any) -> nn.ModuleList:
    """Return a body's layers: its longest list of modules; empty if it has none."""
    return max((m for m in body.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())


@torch.no_grad()
def last_mlp(body: Any, sample_ids: Tensor) -> nn.Module | None:
    """Return the MLP of a body's last layer if `only_last` preserves the last hidden state, or None.

    Args:
        sample_ids: token ids of a short input, one row.
    """
    layers = layers_of(body)
    mlp = getattr(layers[-1], "mlp", None) if len(layers) else None
    if not isinstance(mlp, nn.Module):
        return None
    seen: list[tuple[Any, Any]] = []
    hook = mlp.register_forward_hook(lambda _mlp, inputs, output: seen.append((inputs, output)))
    try:
        whole = body(input_ids=sample_ids, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    # Excludes mixtures of experts, and MLPs with inputs other than hidden states.
    if len(seen) != 1 or not _maps_hidden_states(seen[0][0], seen[0][1], whole):
        return None
    with only_last(mlp, 1):
        cut = body(input_ids=sample_ids, use_cache=False).last_hidden_state
    return mlp if torch.allclose(whole[:, -1], cut[:, -1], rtol=1e-2, atol=1e-3) else None


def _maps_hidden_states(inputs: tuple[Any, ...], output: Any, hidden: Tensor) -> bool:
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
        return False
    return inputs[0].shape == output.shape == hidden.shape
