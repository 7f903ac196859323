"""The last layer's MLP, computed only where it is read.

Of a free text's hidden states nothing but the last few is used, and in the last layer no position reads another
one's MLP: all its other rows are computed, and differentiated, for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def only_last(mlp: nn.Module, positions: int) -> Iterator[None]:
    """While it lasts, `mlp` maps its last positions alone; its output is zero at all others."""

    length = 0

    def cut(_mlp: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        nonlocal length
        (hidden,) = inputs
        length = hidden.shape[1]
        # Contiguous: of a view torch would make one small product for each text, many times slower.
        return (hidden[:, -positions:].contiguous(),)

    def pad(_mlp: nn.Module, _inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return nn.functional.pad(output, (0, 0, length - positions, 0))

    hooks = [mlp.register_forward_pre_hook(cut), mlp.register_forward_hook(pad)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def last_mlp(body: Any, probe: Tensor) -> nn.Module | None:
    """The MLP of a body's last layer, if `only_last` leaves the last hidden state as it is; else None.

    Args:
        probe: token ids, one row of some.
    """
    layers = max((m for m in body.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    mlp = getattr(layers[-1], "mlp", None) if len(layers) else None
    if not isinstance(mlp, nn.Module):
        return None
    seen: list[tuple[Any, Any]] = []
    hook = mlp.register_forward_hook(lambda _mlp, inputs, output: seen.append((inputs, output)))
    try:
        whole = body(input_ids=probe, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    # A mixture of experts, or one that is given more than hidden states, is left alone.
    if len(seen) != 1 or not _maps_hidden_states(seen[0][0], seen[0][1], whole):
        return None
    with only_last(mlp, 1):
        cut = body(input_ids=probe, use_cache=False).last_hidden_state
    return mlp if torch.allclose(whole[:, -1], cut[:, -1], rtol=1e-2, atol=1e-3) else None


def _maps_hidden_states(inputs: tuple[Any, ...], output: Any, hidden: Tensor) -> bool:
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
        return False
    return inputs[0].shape == output.shape == hidden.shape
