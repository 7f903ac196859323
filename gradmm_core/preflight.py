"""What a recipe will release, and what that can be expected to be worth, before anything private is read."""

from __future__ import annotations

import math
from typing import Any

from gradmm_core.privacy import GaussianMechanism, gaussian_mechanism
from gradmm_core.recipe import Recipe
from gradmm_core.release_norms import ReleaseNorms, settled
from gradmm_core.settings import Settings, TargetGradientSettings

#: A class's private mean gradient is taken to differ from that of the model's own text by this part of its norm:
#: a guess for data that nobody has looked at. Measured: 0.19 to 0.41 over two data sets and two models.
EXPECTED_SHIFT = 0.25

#: Below this centred cosine, most of what is matched is noise.
LEAST_CENTRED_COSINE = 0.3

TOO_NOISY_FOR_A_PROBE = (
    "no probe is released: so few records would be lost in its noise, and the gradient has all of the release; "
    "more records or a larger privacy.epsilon make room for one"
)


def released_target(recipe: Recipe) -> TargetGradientSettings:
    """The recipe's `target_gradient` as it is released: see `settled`."""
    mechanism = gaussian_mechanism(recipe.privacy)
    return settled(
        recipe.target_gradient,
        recipe.privacy.clipping_norm,
        mechanism and mechanism.sigma,
        recipe.privacy.declared_records,
    )


class ExpectedCosine(Settings):
    """Between a class's noisy and clean target: as it is, and of what the data add to public text."""

    label: int
    plain: float
    centred: float


def expected_cosines(
    mechanism: GaussianMechanism, norms: ReleaseNorms, space: dict[str, Any], records: int
) -> list[ExpectedCosine]:
    """From public quantities only: a signal of norm s in D coordinates has a cosine of s / sqrt(s^2 + D sigma^2).

    Args:
        space: the figures of the stage `target_space`: `coordinates` (D, of one class) and, for each label,
            those of `PublicStatistics`.
        records: declared for the whole data set; classes are taken to be alike in size.
    """
    labels = list(space["unclipped"])
    per_class = records / len(labels)
    noise = mechanism.sigma * math.sqrt(space["coordinates"])

    def shift(label: str) -> float:
        """The part of a record's clipped vector that the data add: at most all of it."""
        unclipped = EXPECTED_SHIFT * space["unclipped"][label]
        return min(norms.gradient, unclipped * space["clip_scale"][label])

    def cosine(signal: float) -> float:
        return signal / math.hypot(signal, noise)

    return [
        ExpectedCosine(
            label=int(label),
            plain=cosine(per_class * space["plain"][label]),
            centred=cosine(per_class * shift(label)),
        )
        for label in labels
    ]


def preflight_lines(expected: list[ExpectedCosine], names: dict[int, str]) -> list[str]:
    """One line for each class, and a warning if the target will be mostly noise."""
    lines = [
        f"expected cosine of noisy and clean target, {names[e.label]}: {e.plain:.2f}, centred {e.centred:.2f}"
        for e in expected
    ]
    if min(e.centred for e in expected) < LEAST_CENTRED_COSINE:
        lines.append(
            "WARNING: most of this target will be noise; take target_gradient.space=public-subspace and "
            "target_gradient.centred=true, more records, or a larger privacy.epsilon"
        )
    return lines
