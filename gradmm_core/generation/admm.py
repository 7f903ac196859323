"""Algorithm 1 of GRADMM: gradient matching over embeddings, constrained to readable text by ADMM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gradmm.config.settings import AdmmSettings
from gradmm.generation.result import GenerationResult

#: Free embeddings to each example's matching loss, differentiable.
Objective = Callable[[Tensor], Tensor]
#: P: free embeddings to the token ids of readable texts.
Projection = Callable[[Tensor], Tensor]
#: Token ids to embeddings.
Embedding = Callable[[Tensor], Tensor]


def best_draws(
    objective: Objective, embed: Embedding, draws: Int[Tensor, "batch draws tokens"]
) -> Int[Tensor, "batch tokens"]:
    """Choose, for each example, the token sequence with the lowest matching loss."""
    with torch.no_grad():
        losses = torch.stack([objective(embed(draws[:, i])) for i in range(draws.shape[1])], dim=1)
    best = losses.argmin(dim=1)
    return draws[torch.arange(len(draws), device=draws.device), best]


def admm(
    objective: Objective,
    project: Projection,
    embed: Embedding,
    start: Int[Tensor, "batch tokens"],
    settings: AdmmSettings,
    iterations: Iterable[int],
) -> GenerationResult:
    """Solve one independent problem per row: min_X f(X) subject to X being the embeddings of readable text.

        Z <- P(X + L / rho)
        L <- L + rho (X - Z)                                   (not in the first iteration)
        X <- Adam on sum_i f(x_i) + rho/2 ||X - Z + L / rho||^2

    If the X-update is solved accurately, L is minus the gradient of f at X. The next projection then applies to a
    gradient step of length 1/rho. If rho is much larger than gradient norm / distance between tokens, no token
    changes.

    A text is done once its tokens were unchanged for `settings.patience` projections in a row. `history` then
    repeats its last loss.

    Args:
        embed: returns at least float32, the dtype of X, Z and L.
        start: tokens whose embeddings initialise X.
        iterations: `range(settings.iterations)`, optionally wrapped in a progress bar.
    """
    rho = settings.rho
    x = embed(start)
    if settings.initial_steps:
        x = _descend(x, objective, settings, settings.initial_steps)
    dual = torch.zeros_like(x)
    best = _Best.empty(start)
    ids, losses = start, torch.full_like(x[:, 0, 0], torch.inf)
    unchanged = torch.zeros_like(start[:, 0])
    rows = torch.arange(len(start), device=start.device)  # texts that are not done
    history = []
    for t in iterations:
        projected = project(x[rows] + dual[rows] / rho)
        unchanged[rows] = torch.where((projected == ids[rows]).all(dim=1), unchanged[rows] + 1, 0)
        ids = ids.index_copy(0, rows, projected)
        losses = losses.index_copy(0, rows, _losses(objective, embed(projected)))
        history.append(best.update(ids, losses))
        if settings.patience is not None:
            rows = rows[unchanged[rows] < settings.patience]
        if not len(rows):
            break
        z = embed(ids[rows])
        if t > 0:
            dual[rows] += rho * (x[rows] - z)
        anchor = z - dual[rows] / rho

        def augmented(x: Tensor, anchor: Tensor = anchor) -> Tensor:
            return objective(x) + rho / 2 * (x - anchor).square().sum(dim=(1, 2))

        x[rows] = _descend(x[rows], augmented, settings, settings.inner_steps)
    history += [losses] * (settings.iterations - len(history))
    ids = project(x)
    last = _losses(objective, embed(ids))
    history.append(best.update(ids, last))
    if settings.keep == "last":
        return GenerationResult(ids, last, torch.stack(history))
    return GenerationResult(best.ids, best.losses, torch.stack(history))


@dataclass
class _Best:
    """The best projection of each example so far."""

    ids: Tensor
    losses: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> _Best:
        return cls(like.clone(), torch.full((len(like),), torch.inf, device=like.device))

    def update(self, ids: Tensor, losses: Tensor) -> Tensor:
        better = losses < self.losses
        self.ids = torch.where(better[:, None], ids, self.ids)
        self.losses = torch.where(better, losses, self.losses)
        return losses


@torch.no_grad()
def _losses(objective: Objective, embeddings: Tensor) -> Tensor:
    return objective(embeddings)


def _descend(
    x: Float[Tensor, "batch tokens hidden"], objective: Objective, settings: AdmmSettings, steps: int
) -> Float[Tensor, "batch tokens hidden"]:
    """Minimise from x by Adam. Each example's gradient is clipped by its own norm, so rows are independent."""
    x = x.detach().clone().requires_grad_(True)
    adam = torch.optim.Adam([x], lr=settings.learning_rate, fused=True)
    for _ in range(steps):
        (x.grad,) = torch.autograd.grad(objective(x).sum(), [x])
        norms = torch.linalg.vector_norm(x.grad, dim=(1, 2), keepdim=True)
        x.grad *= (settings.gradient_clip / norms.clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1.0)
        adam.step()
    return x.detach()
