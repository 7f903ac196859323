"""Compute the matching loss of a set of texts, and choose a subset that matches well.

GRADMM's guarantee (Nguyen et al., ICML 2025) is about the gradient of the *set*, which is the mean of its texts'
gradients. Given their inner products, the loss of any subset has a closed form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.config.settings import MatchingLoss
from gradmm.gradients.head_gradient import HeadGradients, head_gradients
from gradmm.gradients.matching_loss import matching_loss
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate, length_bucketed, make_batch
from gradmm.target.target_space import TargetSpace

#: A squared norm below this share of the sum of its terms is a rounding error.
ROUNDING = 1e-12


@dataclass(frozen=True)
class TargetSet:
    """The inner products that determine the loss of every subset of some texts of one class.

    `gram[i, j]` is <g_i, g_j>; `products[i]` is <g_i, G>; `target_square` is ||G||^2.
    """

    gram: Float[Tensor, "texts texts"]
    products: Float[Tensor, " texts"]
    target_square: Float[Tensor, ""]
    kind: MatchingLoss

    def loss(self, rows: Sequence[int]) -> float:
        """Compute the loss of the rows' mean gradient; 1 if the mean vanishes."""
        rows = list(rows)
        square, terms = self.gram[rows][:, rows].sum(), self.gram.diagonal()[rows].sum()
        return float(self._losses(self.products[rows].sum(), square, terms, len(rows)))

    def choose(self, count: int, among: Sequence[int], sweeps: int = 5) -> list[int]:
        """Choose `count` rows with a low joint loss: add greedily, then swap while that lowers the loss.

        Ties go to the first row. The result need not be optimal; finding the optimum is NP-hard.
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
        """Find the row whose addition gives the lowest loss."""
        total = self.products[chosen].sum() + self.products
        to_sum = self.gram[:, chosen].sum(dim=1)
        squares = self.gram[chosen][:, chosen].sum() + 2 * to_sum + self.gram.diagonal()
        terms = self.gram.diagonal()[chosen].sum() + self.gram.diagonal()
        losses = self._losses(total, squares, terms, len(chosen) + 1)
        available = torch.zeros(len(losses), dtype=torch.bool)
        available[list(among)] = True
        available[chosen] = False
        return int(losses.masked_fill(~available, torch.inf).argmin())

    def _losses(
        self,
        products: Float[Tensor, "*sets"],
        squares: Float[Tensor, "*sets"],
        terms: Float[Tensor, "*sets"],
        count: int,
    ) -> Float[Tensor, "*sets"]:
        return _set_losses(self.kind, products, squares, terms, count, self.target_square)


def _set_losses(
    kind: MatchingLoss,
    products: Float[Tensor, "*sets"],
    squares: Float[Tensor, "*sets"],
    terms: Float[Tensor, "*sets"],
    count: int,
    target_square: Float[Tensor, ""],
) -> Float[Tensor, "*sets"]:
    """Compute losses from sums over `count` texts. A squared norm within the rounding of its terms is zero."""
    vanish = squares <= ROUNDING * terms
    mean, square = (products / count).masked_fill(vanish, 0.0), (squares / count**2).masked_fill(vanish, 0.0)
    return matching_loss(kind, mean, square, target_square)


@torch.no_grad()
def set_losses(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    kept: Sequence[bool],
    label: int,
    target: Float[Tensor, "rows dimensions"],
    space: TargetSpace,
    kind: MatchingLoss,
    batch_size: int = 64,
) -> tuple[float, float]:
    """Compute the losses of the mean gradients of all texts and of the kept ones, as `TargetSet.loss` does.

    Read every text once. Memory: two matrices of the space, whatever the number of texts.
    """
    flags = torch.tensor(kept, device=language_model.device)
    sums, terms = [torch.zeros(())] * 2, [torch.zeros(())] * 2
    for rows, gradients in _gradients(language_model, template, texts, label, space, batch_size):
        squares = gradients.squared_norms()
        for i, weights in enumerate((torch.ones_like(squares), flags[rows].to(squares))):
            sums[i] = sums[i] + gradients.weighted_sum(weights)
            terms[i] = terms[i] + weights @ squares
    target = target.to(sums[0])
    every, chosen = (
        float(_set_losses(kind, (total * target).sum(), total.square().sum(), term, count, target.square().sum()))
        for total, term, count in zip(sums, terms, (len(texts), int(flags.sum())), strict=True)
    )
    return every, chosen


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
    """Read every text once. Memory: one row of the space and one hidden state for each response token."""
    residual, hidden, centre = [torch.empty(0)] * len(texts), [torch.empty(0)] * len(texts), None
    for rows, gradients in _gradients(language_model, template, texts, label, space, batch_size):
        centre = gradients.centre
        for i, r, h in zip(rows, gradients.residual, gradients.hidden, strict=True):
            residual[i], hidden[i] = r, h
    every = HeadGradients(torch.stack(residual), torch.stack(hidden), centre)
    target = target.to(every.hidden)
    return TargetSet(every.gram().cpu(), every.inner_products(target).cpu(), target.square().sum().cpu(), kind)


def _gradients(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: Sequence[list[int]],
    label: int,
    space: TargetSpace,
    batch_size: int,
) -> Iterator[tuple[list[int], HeadGradients]]:
    """Yield the rows and the gradients in the space, in float64, of batches of texts of similar length."""
    for rows in length_bucketed([len(text) for text in texts], batch_size):
        batch = make_batch(template, [texts[i] for i in rows], [label] * len(rows), language_model.device)
        yield rows, space.project(head_gradients(language_model, batch), label).double()
