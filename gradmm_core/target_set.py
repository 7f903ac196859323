"""The matching loss of a set of texts, and the subset that matches best.

GRADMM's guarantee (Nguyen et al., ICML 2025) is about the gradient of the *set*. That is the mean of its texts'
gradients, so with their inner products in hand the loss of any subset, its mean's, is closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm_core.head_gradient import HeadGradients
from gradmm_core.language_model import LanguageModel
from gradmm_core.matching_loss import matching_loss
from gradmm_core.settings import MatchingLoss
from gradmm_core.target_space import TargetSpace
from gradmm_core.template import TokenisedTemplate, head_gradients, length_bucketed, make_batch

#: A squared norm that is smaller than this part of its terms is nothing but their rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class TargetSet:
    """What decides the loss of every subset of some texts of one class.

    `gram[i, j]` is <g_i, g_j>; `products[i]` is <g_i, G>; `target_square` is ||G||^2.
    """

    gram: Float[Tensor, "texts texts"]
    products: Float[Tensor, " texts"]
    target_square: Float[Tensor, ""]
    kind: MatchingLoss

    def loss(self, rows: Sequence[int]) -> float:
        """Of the rows' mean gradient; it is 1 where that vanishes."""
        rows = list(rows)
        square, parts = self.gram[rows][:, rows].sum(), self.gram.diagonal()[rows].sum()
        return float(self._losses(self.products[rows].sum(), square, parts, len(rows)))

    def choose(self, count: int, among: Sequence[int], sweeps: int = 5) -> list[int]:
        """`count` rows with a low loss together: added greedily, one by one, then swapped while that helps.

        Of equal choices the first row is taken. Not the optimum, which is NP-hard to find.
        """
        chosen: list[int] = []
        while len(chosen) < min(count, len(among)):
            chosen.append(self._best_addition(chosen, among))
        for _ in range(sweeps):
            before = list(chosen)
            for place in range(len(chosen)):
                others = chosen[:place] + chosen[place + 1 :]
                better = self._best_addition(others, among)
                if self.loss([*others, better]) < self.loss(chosen):
                    chosen[place] = better
            if chosen == before:
                break
        return sorted(chosen)

    def _best_addition(self, chosen: list[int], among: Sequence[int]) -> int:
        """The row that brings the loss down most."""
        total = self.products[chosen].sum() + self.products
        to_sum = self.gram[:, chosen].sum(dim=1)
        squares = self.gram[chosen][:, chosen].sum() + 2 * to_sum + self.gram.diagonal()
        parts = self.gram.diagonal()[chosen].sum() + self.gram.diagonal()
        losses = self._losses(total, squares, parts, len(chosen) + 1)
        open_to = torch.zeros(len(losses), dtype=torch.bool)
        open_to[list(among)] = True
        open_to[chosen] = False
        return int(losses.masked_fill(~open_to, torch.inf).argmin())

    def _losses(
        self,
        products: Float[Tensor, "*sets"],
        squares: Float[Tensor, "*sets"],
        parts: Float[Tensor, "*sets"],
        count: int,
    ) -> Float[Tensor, "*sets"]:
        """From sums over `count` texts; sums that vanish but for their parts' rounding do vanish."""
        vanish = squares <= ROUNDING * parts
        mean, square = (products / count).masked_fill(vanish, 0.0), (squares / count**2).masked_fill(vanish, 0.0)
        return matching_loss(self.kind, mean, square, self.target_square)


@torch.no_grad()
def target_set(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    label: int,
    target: Float[Tensor, "rows dimensions"],
    space: TargetSpace,
    kind: MatchingLoss,
    batch_size: int = 64,
) -> TargetSet:
    """Reads every text once. Memory: one row of the space and one hidden state for each response token."""
    residual, hidden, centre = [torch.empty(0)] * len(texts), [torch.empty(0)] * len(texts), None
    for rows in length_bucketed([len(text) for text in texts], batch_size):
        batch = make_batch(template, [texts[i] for i in rows], [label] * len(rows), language_model.device)
        gradients = space.project(head_gradients(language_model, batch), label).double()
        centre = gradients.centre
        for i, r, h in zip(rows, gradients.residual, gradients.hidden, strict=True):
            residual[i], hidden[i] = r, h
    every = HeadGradients(torch.stack(residual), torch.stack(hidden), centre)
    target = target.to(every.hidden)
    return TargetSet(every.gram().cpu(), every.inner_products(target).cpu(), target.square().sum().cpu(), kind)
