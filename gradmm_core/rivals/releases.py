"""Shared by all rivals: a release's entry in the ledger, noisy parts of it, and columns of unfiltered texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.privacy.clipped_sum import ExactSum
from gradmm.privacy.ledger import Release
from gradmm.privacy.mechanism import GaussianMechanism, epsilon_of

#: Values of `Release.space` for the releases of Private Evolution, EPSVec, DP few-shot and DP adapters.
VOTES = "votes for texts"
MEAN_STATES = "mean hidden states"
NEXT_TOKENS = "next-token probabilities"
ADAPTERS = "weights of adapters"

#: Columns of a filter's decision, for stages that read texts after all filters.
UNFILTERED = {"probability": np.nan, "kept": True, "reason": ""}


def mechanism_of_part(claim: GaussianMechanism, parts: int) -> GaussianMechanism:
    """Return the mechanism of each of `parts` sums of sensitivity 1 that compose to `claim`, of sensitivity 1.

    It has sqrt(parts) times the claim's noise.
    """
    return claim.model_copy(update={"clipping_norm": math.sqrt(parts)})


def rival_release(
    recipe: str,
    mechanism: GaussianMechanism,
    space: str,
    parts: int = 1,
    key: str = "",
    settings_key: str = "",
) -> Release:
    """Describe one of `parts` releases that compose to `mechanism`, for the ledger.

    Args:
        mechanism: of all parts together, with sensitivity 1. Each part has sqrt(parts) times its noise.
        space: of the released vector.
    """
    sigma = mechanism.sigma * parts**0.5
    return Release(
        recipe=recipe,
        epsilon=epsilon_of(mechanism.sensitivity / sigma, mechanism.delta, mechanism.discrete),
        delta=mechanism.delta,
        sigma=sigma,
        clipping_norm=mechanism.record_norm,
        adjacency=mechanism.adjacency,
        noise="discrete-gaussian" if mechanism.discrete else "gaussian",
        space=space,
        stage_key=key,
        settings_key=settings_key,
    )


def counted_records(records: Mapping[int, float], deviations: Mapping[int, float]) -> dict[str, dict[str, float]]:
    """Return the figures of a release that counts each class's records, see `read_records`.

    Args:
        records: noisy numbers, by label.
        deviations: standard deviations of their noise.
    """
    figures = {"records": records, "records_deviation": deviations}
    return {name: {str(label): value for label, value in of_class.items()} for name, of_class in figures.items()}


def read_records(figures: Mapping[str, Any]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the noisy number of each class's records, and the noise's standard deviations, by label."""
    records, deviations = (
        {int(label): value for label, value in figures[name].items()} for name in ("records", "records_deviation")
    )
    return records, deviations


def exact_sum(
    vectors: Iterator[Float[Tensor, "records k"]], size: int, mechanism: GaussianMechanism
) -> Float[np.ndarray, " k"]:
    """Sum vectors of norm at most 1: batches without rounding error; on the discrete sampler's grid, exactly."""
    total = ExactSum()
    for each in vectors:
        part = torch.from_numpy(mechanism.quantise(each.numpy())) if mechanism.discrete else each
        total.add_part(part.sum(dim=0))
    return total.total.expand(size).clone().numpy()


def noisy_sum(
    vectors: Iterator[Float[Tensor, "records k"]], size: int, mechanism: GaussianMechanism
) -> Float[np.ndarray, " k"]:
    """Sum vectors of norm at most 1 and add noise: one part of the release."""
    total = exact_sum(vectors, size, mechanism)
    return total + mechanism.noise(total.shape)
