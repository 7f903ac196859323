"""Gradients of real and of synthetic texts along fine-tuning, and bounds on how far the two losses part.

Let L and S be the mean response losses of real texts and of the texts that the model is fine-tuned on, th_0, th_1,
... the parameters along the way, and

    e_t = ||grad L(th_t) - grad S(th_t)||  the gap,       D_t = ||th_t - th_0||  the drift.

Assume that in a convex region that contains th_0, th_1, ... the gradient of L is Lipschitz with a constant b_L and
that of S with b_S (their smoothness). Then the gradient of f = L - S is Lipschitz with some b <= b_L + b_S. Two
bounds follow, which hold with b_L + b_S, from the smoothness of each loss, and are sharper with b itself.

    Lemma.    e_t <= ||grad f(th_0)|| + ||grad f(th_t) - grad f(th_0)|| <= e_0 + b D_t.
    Theorem.  |(L(th_t) - L(th_0)) - (S(th_t) - S(th_0))| <= e_0 D_t + b D_t^2 / 2.
    Proof.    f(th_t) - f(th_0) is the integral over u from 0 to 1 of <grad f(th_0 + u d), d> with d = th_t - th_0,
              and by the lemma ||grad f(th_0 + u d)|| <= e_0 + b u D_t.

In words: the gap at the start, the drift and the smoothness bound the difference between the changes of the two
losses. The optimiser is arbitrary (Adam as well as gradient descent), and neither loss need be convex.

Gaps, drifts and losses are measured on a sample of the real rows. The constants are unknown. They are estimated by
secants, ||grad L(x) - grad L(y)|| / ||x - y||, over pairs of points where gradients are measured: each checkpoint
with th_0 and with the previous checkpoint, and the point at the fraction `EARLY` of the straight line from th_0 to
the last checkpoint with both ends. No secant exceeds the true constant, so their maximum is a *lower* estimate: a
bound computed with it can fail. The estimate for th_t excludes all pairs that contain th_t: with the pair
(th_0, th_t) the lemma would be the triangle inequality, which holds for any losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gradmm.data.examples import Examples
from gradmm.evaluation.finetune_eval import Finetuning
from gradmm.evaluation.schedule import Schedule
from gradmm.gradients.mean_gradient import (
    MeanGradient,
    distance,
    in_head,
    inner_products,
    mean_gradient,
    squared_distances,
)
from gradmm.lm.language_model import LanguageModel

#: Point on the straight line, near its start, where the losses of fine-tuning bend most.
EARLY = 0.1

#: Columns with the smoothness of L, of S, and of L - S.
SMOOTHNESS = ("real_smoothness", "arm_smoothness", "gap_smoothness")

GradientOf = Callable[[LanguageModel], MeanGradient]


def gradient_path(
    finetuning: Finetuning, arm: str, examples: Examples, real: Examples, schedule: Schedule, seed: int
) -> pd.DataFrame:
    """Fine-tune on an arm's texts, and measure gradients of these and of real texts at step 0 and each checkpoint.

    Memory: at most three copies of the parameters and six gradients, in addition to the training.

    Returns:
        One row per step and part ("head", "all"): `arm`, `seed`, `learning_rate`, `steps`, and the columns of
        `path_rows`.

    Raises:
        InputError: if there are no examples.
    """
    description = f"gradients along fine-tuning on {arm}, seed={seed}"
    checkpoints = finetuning.checkpoints(examples, schedule, seed, description)
    frame = path_rows(
        finetuning.fresh_model(),
        checkpoints,
        lambda model: mean_gradient(model, finetuning.template, real),
        lambda model: mean_gradient(model, finetuning.template, examples),
    )
    run = pd.DataFrame({"arm": arm, "seed": seed, **schedule._asdict()}, index=frame.index)
    return pd.concat([run, frame], axis=1)


def path_rows(
    start: LanguageModel, checkpoints: Iterable[tuple[int, LanguageModel]], real: GradientOf, arm: GradientOf
) -> pd.DataFrame:
    """Measure losses, gradients and smoothness at th_0 and along a path from it.

    Args:
        start: the model at th_0. At the end it is moved along the straight line and left there.
        checkpoints: the number of steps taken, above zero, and the model at th_t; it may be one model in training.
        real, arm: return the loss and the gradient at a model's parameters.

    Returns:
        A row for each step, zero first, and part of the parameters ("head", "all"), with these columns of the part
            real_norm, arm_norm, gap: ||g_real||, ||g_arm||, ||g_arm - g_real||
            error: gap / real_norm
            cosine: of g_arm and g_real
        and these of the step, the same for both parts:
            real_loss, arm_loss: nats
            drift: ||th_t - th_0||
            real_smoothness, arm_smoothness, gap_smoothness: the largest secant of L, S and L - S that excludes
                th_t; at step 0 the largest of all.
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
        # In place, without a copy of th_0: only its gradients are used from here on.
        for parameter, last in zip(_parameters(start), before, strict=True):
            parameter.lerp_(last, EARLY)
        early, drift = _Measured.at(start, None, real, arm), rows[-1]["drift"]
        secants.add(first, early, EARLY * drift)
        secants.add(early, previous, (1 - EARLY) * drift)
    return pd.DataFrame([row | secants.smoothness(row["step"]) for row in rows])


@dataclass(frozen=True, eq=False)
class _Measured:
    """Losses and gradients of both sets of texts at one point. `step` is None on the straight line."""

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
    """Secants of both losses and of their difference, each with the two steps that it connects."""

    found: list[tuple[set[int | None], list[float]]] = field(default_factory=list)

    def add(self, one: _Measured, other: _Measured, apart: float) -> None:
        """Add the secant between two points; a point has none with itself."""
        if apart == 0:
            return
        changes = (
            distance(one.real.gradient, other.real.gradient),
            distance(one.arm.gradient, other.arm.gradient),
            distance(one.gaps, other.gaps),
        )
        self.found.append(({one.step, other.step}, [change / apart for change in changes]))

    def smoothness(self, step: int) -> dict[str, float]:
        """Return the largest secants that exclude the step; 0 without any, NaN after a divergence."""
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
        sums = {name: values[chosen].sum() for name, values in products.items()}
        real_norm, arm_norm, gap = (sums[name].sqrt() for name in ("real", "arm", "gap"))
        row = {
            "step": point.step,
            "part": part,
            "real_norm": real_norm,
            "arm_norm": arm_norm,
            "gap": gap,
            "error": gap / real_norm,
            "cosine": sums["both"] / (real_norm * arm_norm),
            "real_loss": point.real.loss,
            "arm_loss": point.arm.loss,
            "drift": drift,
        }
        rows.append({k: v.item() if isinstance(v, Tensor) else v for k, v in row.items()})
    return rows


def _parameters(model: LanguageModel) -> list[Tensor]:
    return [parameter.detach() for parameter in model.model.parameters()]
