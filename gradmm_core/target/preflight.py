"""Estimate the quality of a private target before private records are read."""

from __future__ import annotations

import math
from typing import Any

from gradmm.config.recipe import Recipe
from gradmm.config.settings import PrivacySettings, Settings
from gradmm.errors import InputError
from gradmm.privacy.mechanism import MAX_TERMS, GaussianMechanism
from gradmm.privacy.release_plan import ReleasePlan, release_plan
from gradmm.privacy.sensitivity import ReleaseNorms

#: Assumed difference of a class's private mean gradient from that of the model's own text, relative to the norm of
#: the latter. Measured: 0.19 to 0.41 over two data sets and two models.
EXPECTED_SHIFT = 0.25

#: Below this centred cosine, most of the target is noise.
MIN_CENTRED_COSINE = 0.3

#: Values of epsilon to suggest.
EPSILONS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)


class ExpectedCosine(Settings):
    """Expected cosine between a class's noisy and noiseless target: plain, and of the centred targets."""

    label: int
    plain: float
    centred: float


def expected_cosines(
    mechanism: GaussianMechanism, norms: ReleaseNorms, space: dict[str, Any], records: int
) -> list[ExpectedCosine]:
    """Compute s / sqrt(s^2 + D sigma^2), for a signal of norm s in D coordinates, from public quantities only.

    Args:
        space: the figures of the stage `target_space`: `coordinates` (D, of one class) and, for each label, those
            of `PublicStatistics`.
        records: declared number for the whole data set; classes are assumed to have equal size.
    """
    labels = list(space["unclipped"])
    per_class = records / len(labels)
    noise = mechanism.sigma * math.sqrt(space["coordinates"])

    def shift(label: str) -> float:
        """Estimate the norm of a record's clipped difference from the centre, at most the clipping norm."""
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


def parts_left_out(recipe: Recipe, plan: ReleasePlan) -> list[str]:
    """Say which parts that the recipe asks for are not released because of the noise, and what would help."""
    missing = _missing(recipe, plan)
    if not missing:
        return []
    enough = next((epsilon for epsilon in EPSILONS if _releases_all(recipe, epsilon)), None)
    larger = "" if enough is None else f", or privacy.epsilon={enough:g}"
    return [f"{part}: too few records for the noise; use more records{larger}" for part in missing]


def _missing(recipe: Recipe, plan: ReleasePlan) -> list[str]:
    asked, released = recipe.target_gradient, plan.target
    parts = {
        "no probe": released.probe_share < asked.probe_share,
        "no second moment, so the probe labels texts but chooses none": released.releases_class_sums_alone
        and not asked.releases_class_sums_alone,
        "no token rates": released.token_share < asked.token_share,
    }
    return [part for part, is_missing in parts.items() if is_missing]


def _releases_all(recipe: Recipe, epsilon: float) -> bool:
    """Return whether a release under a larger epsilon than the recipe's would have all parts."""
    if epsilon <= (recipe.privacy.epsilon or math.inf):
        return False
    privacy = recipe.privacy.model_copy(update={"epsilon": epsilon})
    try:
        return not _missing(recipe, release_plan(recipe.model_copy(update={"privacy": privacy})))
    except InputError:  # the formula of the paper has no such epsilon
        return False


def delta_warning(settings: PrivacySettings) -> str:
    """Warn of a delta that the recipe sets to 1 / (10 N) or more for N declared records; empty otherwise."""
    delta, records = settings.delta, settings.declared_records
    if delta is None or records is None or delta * records < 0.1:
        return ""
    unit = 10.0 ** (math.floor(math.log10(0.1 / records)) - 1)
    below = math.floor(0.1 / records / unit * (1 + 1e-9)) * unit  # two digits, not rounded up
    return (
        f"WARNING: privacy.delta {delta:.3g} times {records} declared records is {delta * records:.2g}: a "
        f"guarantee with this delta would allow as many records to be published. Set less than {below:.2g}"
    )


def check_rounding(recipe: Recipe, response_tokens: int) -> None:
    """Check that rounding cannot move a private sum by more than the sensitivity allows for (`SUM_SLACK`).

    Args:
        response_tokens: of the longest verbaliser.

    Raises:
        InputError: if it could.
    """
    records = recipe.privacy.declared_records
    if recipe.privacy.epsilon is None or recipe.privacy.sampler == "discrete" or records is None:
        return
    rows = recipe.privacy.max_rows_per_unit or 1
    most = MAX_TERMS // (records * rows * response_tokens)
    if recipe.target_gradient.batch_size > most:
        fix = f"set at most {most}, or privacy.sampler=discrete" if most else "set privacy.sampler=discrete"
        raise InputError(f"sums of {records:,} records are rounded too much", "target_gradient.batch_size", fix)


def preflight_lines(expected: list[ExpectedCosine], names: dict[int, str]) -> list[str]:
    """Write one line for each class, and a warning if most of the target will be noise."""
    lines = [
        f"expected cosine of noisy and clean target, {names[e.label]}: {e.plain:.2f}, centred {e.centred:.2f}"
        for e in expected
    ]
    if min(e.centred for e in expected) < MIN_CENTRED_COSINE:
        lines.append(
            "WARNING: most of this target will be noise; use target_gradient.space=public-subspace and "
            "target_gradient.centred=true, more records, or a larger privacy.epsilon"
        )
    return lines
