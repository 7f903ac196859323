"""Gradients of real and of synthetic texts along fine-tuning, and what they bound.

Write L and S for the mean response losses of real texts and of those that the model is fine-tuned on, th_0, th_1,
... for the parameters along the way, and

    e_t = ||grad L(th_t) - grad S(th_t)||  the gap,       D_t = ||th_t - th_0||  the drift.

Assume that in a convex region that holds th_0, th_1, ... the gradient of L is Lipschitz with a constant b_L, and
that of S with b_S (their smoothness). Then that of f = L - S is so with a b of at most b_L + b_S, and two bounds
follow. With b_L + b_S they speak of the losses one by one; with b itself they are sharper.

    Lemma.    e_t <= ||grad f(th_0)|| + ||grad f(th_t) - grad f(th_0)|| <= e_0 + b D_t.
    Theorem.  |(L(th_t) - L(th_0)) - (S(th_t) - S(th_0))| <= e_0 D_t + b D_t^2 / 2.
    Proof.    f(th_t) - f(th_0) is the integral over u from 0 to 1 of <grad f(th_0 + u d), d> with d = th_t - th_0,
              and by the lemma ||grad f(th_0 + u d)|| <= e_0 + b u D_t.

In words: how differently the two losses have changed is bounded by the gap at the start, the drift and the
smoothness. How th_t was reached is of no matter (Adam is as good as plain descent), nor is convexity assumed.

Gaps, drifts and losses are measured, on a sample of the real rows, which stands for all of them. The constants
are not known. They are estimated by secants, ||grad L(x) - grad L(y)|| / ||x - y|| for pairs of points where
gradients are measured: each checkpoint with th_0 and with the one before it, and the point at the fraction `EARLY`
of the straight line from th_0 to the last checkpoint with both of its ends. No secant exceeds the true constant:
their maximum is a *lower* estimate, and a bound made with it can fail. The estimate for th_t leaves out all pairs
with th_t in them: with the pair (th_0, th_t) the lemma would be the triangle inequality, and would hold whatever
the losses are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gradmm_core.finetune_eval import Examples, Finetuning
from gradmm_core.language_model import LanguageModel
from gradmm_core.mean_gradient import (
    MeanGradient,
    distance,
    in_head,
    inner_products,
    mean_gradient,
    squared_distances,
)

#: Where on the straight line gradients are measured: where fine-tuning's losses bend most.
EARLY = 0.1

#: Columns: of L, of S, and of L - S.
SMOOTHNESS = ("real_smoothness", "arm_smoothness", "gap_smoothness")

GradientOf = Callable[[LanguageModel], MeanGradient]


def gradient_path(
    finetuning: Finetuning, arm: str, examples: Examples, real: Examples, learning_rate: float, seed: int
) -> pd.DataFrame:
    """Fine-tunes on an arm's texts; the gradients of them and of real texts at step 0 and at every checkpoint.

    Beside the training itself this keeps at most three copies of the parameters and six gradients.

    Returns:
        One row per step and part ("head", "all"): `arm`, `seed`, `learning_rate`, and the columns of `path_rows`.

    Raises:
        InputError: if there are no examples.
    """
    description = f"gradients along fine-tuning on {arm}, seed={seed}"
    checkpoints = finetuning.checkpoints(examples, learning_rate, seed, description)
    frame = path_rows(
        finetuning.fresh_model(),
        checkpoints,
        lambda model: mean_gradient(model, finetuning.template, real),
        lambda model: mean_gradient(model, finetuning.template, examples),
    )
    run = pd.DataFrame({"arm": arm, "seed": seed, "learning_rate": learning_rate}, index=frame.index)
    return pd.concat([run, frame], axis=1)


def path_rows(
    start: LanguageModel, checkpoints: Iterable[tuple[int, LanguageModel]], real: GradientOf, arm: GradientOf
) -> pd.DataFrame:
    """What is measured at th_0 and along a path from it.

    Args:
        start: at th_0. It is moved along the straight line in the end, and left there.
        checkpoints: steps taken, above zero, and a model at th_t; all of them may be one that trains on.
        real, arm: loss and gradient at a model's parameters.

    Returns:
        A row for each step, zero first, and each part of the parameters ("head", "all"), with the part's
            real_norm, arm_norm, gap: ||g_real||, ||g_arm||, ||g_arm - g_real||
            error: gap / real_norm
            cosine: of g_arm and g_real
        and with what is the step's, for both parts alike:
            real_loss, arm_loss: nats
            drift: ||th_t - th_0||
            real_smoothness, arm_smoothness, gap_smoothness: the largest secant of L, S and L - S without th_t; at
                step 0 the largest of all.
    """
    head = torch.tensor(in_head(start))
    first = previous = _Measured.at(start, 0, real, arm)
    secants = _Secants()
    rows = _part_rows(first, head, drift=0.0)
    before: list[Tensor] = []
    for step, model in checkpoints:
        parameters = _parameters(model)
        drift = distance(parameters, _parameters(start))
        measured = _Measured.at(model, step, real, arm)
        rows += _part_rows(measured, head, drift)
        secants.add(first, measured, drift)
        if before:
            secants.add(previous, measured, distance(before, parameters))
        before = [parameter.clone() for parameter in parameters]
        previous = measured
    if before:
        # In place, so that th_0 needs no copy: nothing but its gradients is used from here on.
        for parameter, last in zip(_parameters(start), before, strict=True):
            parameter.lerp_(last, EARLY)
        early, drift = _Measured.at(start, None, real, arm), rows[-1]["drift"]
        secants.add(first, early, EARLY * drift)
        secants.add(early, previous, (1 - EARLY) * drift)
    return pd.DataFrame([row | secants.smoothness(row["step"]) for row in rows])


@dataclass(frozen=True, eq=False)
class _Measured:
    """Both losses and gradients at one point. `step` is None on the straight line."""

    step: int | None
    real: MeanGradient
    arm: MeanGradient

    @property
    def gaps(self) -> Iterator[Tensor]:
        """grad L - grad S, one parameter after another."""
        for real, arm in zip(self.real.gradient, self.arm.gradient, strict=True):
            yield real - arm

    @classmethod
    def at(cls, model: LanguageModel, step: int | None, real: GradientOf, arm: GradientOf) -> _Measured:
        return cls(step, real(model), arm(model))


@dataclass(frozen=True)
class _Secants:
    """Of both losses and of their difference, with the steps that each lies between."""

    found: list[tuple[set[int | None], list[float]]] = field(default_factory=list)

    def add(self, one: _Measured, other: _Measured, apart: float) -> None:
        """Nothing where the two are the same point: it has no secant."""
        if apart == 0:
            return
        changes = (
            distance(one.real.gradient, other.real.gradient),
            distance(one.arm.gradient, other.arm.gradient),
            distance(one.gaps, other.gaps),
        )
        self.found.append(({one.step, other.step}, [change / apart for change in changes]))

    def smoothness(self, step: int) -> dict[str, float]:
        """The largest without the step; of none 0, which is a lower estimate too. NaN after a divergence."""
        left = [secants for steps, secants in self.found if step == 0 or step not in steps]
        largest = np.max([[0.0] * len(SMOOTHNESS), *left], axis=0).tolist()
        return dict(zip(SMOOTHNESS, largest, strict=True))


def _part_rows(point: _Measured, head: Tensor, drift: float) -> list[dict[str, Any]]:
    real, arm = point.real.gradient, point.arm.gradient
    products = {
        "real": inner_products(real, real),
        "arm": inner_products(arm, arm),
        "both": inner_products(real, arm),
        "gap": squared_distances(real, arm),
    }
    rows = []
    for part, chosen in (("head", head), ("all", torch.ones_like(head))):
        of_part = {name: values[chosen].sum() for name, values in products.items()}
        real_norm, arm_norm, gap = (of_part[name].sqrt() for name in ("real", "arm", "gap"))
        row = {
            "step": point.step,
            "part": part,
            "real_norm": real_norm,
            "arm_norm": arm_norm,
            "gap": gap,
            "error": gap / real_norm,
            "cosine": of_part["both"] / (real_norm * arm_norm),
            "real_loss": point.real.loss,
            "arm_loss": point.arm.loss,
            "drift": drift,
        }
        rows.append({k: v.item() if isinstance(v, Tensor) else v for k, v in row.items()})
    return rows


def _parameters(model: LanguageModel) -> list[Tensor]:
    return [parameter.detach() for parameter in model.model.parameters()]
