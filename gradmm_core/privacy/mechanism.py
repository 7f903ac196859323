"""The Gaussian mechanism: calibrate its noise to an (epsilon, delta) guarantee, and draw the noise."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from gradmm.config.settings import PrivacySettings, Settings
from gradmm.errors import InputError

#: The discrete sampler's grid has a step of 2^-GRID_BITS times the largest power of two up to the clipping norm.
GRID_BITS = 20

#: Bound on the rounding errors of a sum in float64, relative to the clipping norm. Each batch is summed by a
#: matrix product, with an error of at most 2^-53 times the number of its terms times the sum of their norms;
#: batches are added without error. The bound holds up to `MAX_TERMS` records x rows of a batch x response tokens,
#: if no term of a clipped vector is longer than `MAX_TERM` C. Terms are longer than C only where a centre is
#: subtracted from a product of factors.
SUM_SLACK = 2.0**-20
MAX_TERMS = 2**28
MAX_TERM = 16


class GaussianMechanism(Settings):
    """Gaussian noise for a sum of vectors of L2 norm at most `clipping_norm`, one vector per record.

    Formal guarantee: with `calibration="analytic"`, one release of all classes' clipped sums, as one vector, is
    (epsilon, delta)-differentially private for one record under the named adjacency. For the floating-point
    sampler the proof assumes noise of exact real numbers, and the low-order bits of the noise can leak information
    (Mironov, 2012); the rounding of the sums is part of the sensitivity (`SUM_SLACK`). For the discrete sampler
    the guarantee holds for the arithmetic as executed: each record's vector is rounded towards zero on a grid
    (`quantise`), sums on the grid are exact, and the noise is OpenDP's exact discrete Gaussian, which is
    1/(2 sigma^2)-zCDP for sensitivity 1 in any dimension (Canonne, Kamath and Steinke, 2020).

    `calibration="paper"` is the classic sigma = sqrt(2 log(1.25 / delta)) / epsilon per unit of sensitivity (Dwork
    and Roth), which is proved only for epsilon <= 1. GRADMM's sensitivity C / N of a mean, which is not used here,
    is correct only if N is public and fixed.
    """

    epsilon: float
    delta: float
    clipping_norm: float
    adjacency: Literal["add-or-remove", "replace"]
    calibration: Literal["analytic", "paper"]
    sampler: Literal["floating-point", "discrete"] = "floating-point"
    unsafe_noise_seed: int | None = None

    @property
    def record_norm(self) -> float:
        """The largest L2 change of the sum, as computed, by one record: C, and the rounding of sums in float64."""
        return self.clipping_norm * (1.0 if self.discrete else 1 + SUM_SLACK)

    @property
    def sensitivity(self) -> float:
        """The largest L2 change of the sum between neighbours: `record_norm`, or twice that if one is replaced."""
        return self.record_norm * (2.0 if self.adjacency == "replace" else 1.0)

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise in each coordinate."""
        if self.calibration == "paper":
            return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon
        if self.sampler == "discrete":
            return self.sensitivity * discrete_multiplier(self.epsilon, self.delta)
        return self.sensitivity * analytic_multiplier(self.epsilon, self.delta)

    @property
    def safe(self) -> bool:
        """Whether the noise is unseeded. Anyone who knows the seed can subtract the noise."""
        return self.unsafe_noise_seed is None

    @property
    def discrete(self) -> bool:
        return self.sampler == "discrete"

    def noise(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw noise for the sum, in float64; a fresh draw on each call unless there is an unsafe seed."""
        if self.unsafe_noise_seed is not None:
            return np.random.default_rng(self.unsafe_noise_seed).normal(scale=self.sigma, size=shape)
        if self.discrete:
            return discrete_gaussian(shape, self.sigma / self._step) * self._step
        return self.sigma * system_standard_normal(shape)

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        """Round clipped vectors (records x ...) towards zero on the grid: norms do not grow, and sums are exact.

        Raises:
            ValueError: if a rounded vector is longer than C.
        """
        grid = np.trunc(vectors / self._step).reshape(len(vectors), math.prod(vectors.shape[1:])).astype(np.int64)
        if len(grid) and np.square(grid).sum(axis=1).max() > (self.clipping_norm / self._step) ** 2:
            raise ValueError("a vector is longer than the clipping norm")
        return grid.reshape(vectors.shape) * self._step

    @property
    def _step(self) -> float:
        """The step of the grid: a power of two, so that its multiples add without rounding."""
        return 2.0 ** (math.floor(math.log2(self.clipping_norm)) - GRID_BITS)


def gaussian_mechanism(settings: PrivacySettings) -> GaussianMechanism | None:
    """Build the mechanism of a recipe; None if the recipe asks for no guarantee.

    Raises:
        InputError: if the noise is too small for the claim, which the paper's formula allows above epsilon 1.
    """
    if settings.epsilon is None:
        return None
    mechanism = GaussianMechanism(
        epsilon=settings.epsilon,
        delta=resolved_delta(settings),
        clipping_norm=settings.clipping_norm,
        adjacency=settings.adjacency,
        calibration=settings.calibration,
        sampler=settings.sampler,
        unsafe_noise_seed=settings.unsafe_noise_seed,
    )
    spent = gaussian_delta(mechanism.sigma / mechanism.sensitivity, mechanism.epsilon)
    if spent > mechanism.delta:
        raise InputError(
            f"the paper's formula spends a delta of {spent:.3g} at epsilon {mechanism.epsilon:g}",
            "privacy.calibration",
            "use 'analytic'",
        )
    return mechanism


def resolved_delta(settings: PrivacySettings) -> float:
    """Return the recipe's delta, or its default for the declared number of records."""
    delta = settings.resolved_delta
    assert delta is not None  # the recipe's validation requires one of the two
    return delta


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Compute the smallest delta at epsilon of the Gaussian mechanism with sigma = noise_multiplier x sensitivity.

    Source: Balle and Wang (2018), theorem 8.
    """
    half, shift = 0.5 / noise_multiplier, epsilon * noise_multiplier
    first, second = log_ndtr(half - shift), epsilon + log_ndtr(-half - shift)
    return float(math.exp(first) * -math.expm1(min(second - first, 0.0)))


#: Rényi orders over which the conversion from zCDP is minimised. They are dense at the optimum of small epsilons.
ORDERS = tuple((1 + np.geomspace(1e-3, 1e6, 2000)).tolist())


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Convert rho-zero-concentrated DP to an epsilon at delta, by dp-accounting's Rényi accountant."""
    from dp_accounting import ZCDpEvent  # late: the import takes a second
    from dp_accounting.rdp import RdpAccountant

    return float(RdpAccountant(orders=ORDERS).compose(ZCDpEvent(rho=rho, xi=0.0)).get_epsilon(delta))


def epsilon_of(mu: float, delta: float, discrete: bool) -> float:
    """Compute the epsilon at delta of Gaussian noise with sensitivity / sigma = mu.

    Exact for the Gaussian mechanism (Balle and Wang, 2018); by zero-concentrated DP for discrete Gaussian noise.
    """
    if mu == 0:
        return 0.0
    if discrete:
        return zcdp_epsilon(mu**2 / 2, delta)
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian  # late: the import takes a second

    with np.errstate(divide="ignore"):  # the search starts at an epsilon whose delta underflows to 0
        return float(get_epsilon_gaussian(1 / mu, delta, tol=1e-15))


@lru_cache
def analytic_multiplier(epsilon: float, delta: float) -> float:
    """Compute the smallest sigma / sensitivity with `gaussian_delta` at most delta, to ten digits, from above."""
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian  # late: the import takes a second

    multiplier = get_sigma_gaussian(epsilon, delta) * (1 + 1e-10)  # above the solver's error
    while gaussian_delta(multiplier, epsilon) > delta:
        multiplier *= 1 + 1e-12
    return multiplier


@lru_cache
def discrete_multiplier(epsilon: float, delta: float) -> float:
    """Compute the smallest sigma / sensitivity of the discrete Gaussian with `zcdp_epsilon` at most epsilon.

    Raises:
        InputError: if the epsilon is too small for the conversion from zCDP.
    """
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian  # late: the import takes a second

    analytic = get_sigma_gaussian(epsilon, delta)

    def excess(multiplier: float) -> float:
        return zcdp_epsilon(0.5 / multiplier**2, delta) - epsilon

    if excess(4 * analytic) > 0:
        problem = f"no discrete noise is known to have an epsilon of {epsilon:g} at a delta of {delta:g}"
        raise InputError(problem, "privacy.epsilon", "set a larger one, or privacy.sampler=floating-point")
    multiplier: float = brentq(excess, 0.9 * analytic, 4 * analytic, xtol=1e-9 * analytic)  # pyright: ignore
    while excess(multiplier) > 0:
        multiplier *= 1 + 1e-9
    return multiplier


def discrete_gaussian(shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Draw integers with probability exactly proportional to exp(-x^2 / (2 scale^2)), by OpenDP's sampler."""
    # Imported here because opendp is an optional dependency.
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian
    from opendp.metrics import l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    sample = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=scale)
    return np.array(sample([0] * math.prod(shape)), dtype=np.int64).reshape(shape)


def system_standard_normal(shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normal numbers from the operating system's generator. Keep no state that could repeat them."""
    size = math.prod(shape)
    words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
    # 52 random bits at the midpoints of their cells: uniform on the open interval (0, 1). With 53, half of the
    # midpoints would be rounded, the largest to 1.
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return ndtri(uniform).reshape(shape)
