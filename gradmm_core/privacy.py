"""The Gaussian mechanism: how much noise a guarantee costs, and where the noise comes from."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from importlib.metadata import version
from typing import Literal

import numpy as np
from dp_accounting import ZCDpEvent
from dp_accounting.gaussian_mechanism import get_sigma_gaussian
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from gradmm_core.errors import InputError
from gradmm_core.settings import PrivacySettings, Settings

#: Bits of the clipping norm on the grid of the discrete sampler.
GRID_BITS = 20


class GaussianMechanism(Settings):
    """Adds Gaussian noise to a sum of vectors of norm at most `clipping_norm`, one per record.

    Formal guarantee: with `calibration="analytic"` one release of the sum of all classes' clipped gradients is
    (epsilon, delta)-differentially private for one record under the named adjacency. With the floating-point
    sampler the proof is for exact real numbers, and the last bits of the noise can give something away
    (Mironov, 2012). With the discrete sampler it holds for the numbers that the computer works with: every
    record's vector is rounded towards zero on a grid (`quantise`), sums on it are exact, and the noise is
    OpenDP's exact discrete Gaussian, which is 1/(2 sigma^2)-zCDP for sensitivity 1 in any dimension (Canonne,
    Kamath and Steinke, 2020).

    `calibration="paper"` is the classic sqrt(2 log(1.25 / delta)) / epsilon of Dwork and Roth, which is proved
    for epsilon <= 1 only; GRADMM's own C/N sensitivity of a mean is right only where N is public and fixed.
    """

    epsilon: float
    delta: float
    clipping_norm: float
    adjacency: Literal["add-or-remove", "replace"]
    calibration: Literal["analytic", "paper"]
    sampler: Literal["floating-point", "discrete"] = "floating-point"
    unsafe_noise_seed: int | None = None

    @property
    def sensitivity(self) -> float:
        """Largest change of the sum between neighbouring data sets: C, or 2 C where a record is replaced."""
        return self.clipping_norm * (2.0 if self.adjacency == "replace" else 1.0)

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in each coordinate."""
        if self.calibration == "paper":
            return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon
        if self.sampler == "discrete":
            return self.sensitivity * discrete_multiplier(self.epsilon, self.delta)
        multiplier = get_sigma_gaussian(self.epsilon, self.delta) * (1 + 1e-10)  # beyond all rounding
        while gaussian_delta(multiplier, self.epsilon) > self.delta:
            multiplier *= 1 + 1e-12
        return self.sensitivity * multiplier

    @property
    def safe(self) -> bool:
        """False if a seed was given for the noise: whoever knows it can take the noise off again."""
        return self.unsafe_noise_seed is None

    @property
    def discrete(self) -> bool:
        return self.sampler == "discrete"

    def noise(self, shape: tuple[int, ...]) -> np.ndarray:
        """Noise to add to the sum, float64. Never the same twice, unless an unsafe seed was asked for."""
        if self.unsafe_noise_seed is not None:
            return np.random.default_rng(self.unsafe_noise_seed).normal(scale=self.sigma, size=shape)
        if self.discrete:
            return discrete_gaussian(shape, self.sigma / self._step) * self._step
        return self.sigma * system_standard_normal(shape)

    def quantise(self, vectors: np.ndarray) -> np.ndarray:
        """Clipped vectors (records x ...) rounded towards zero on the grid: none is made longer, sums are exact.

        Raises:
            ValueError: if a vector is longer than C.
        """
        grid = np.trunc(vectors / self._step).reshape(len(vectors), -1).astype(np.int64)
        if len(grid) and np.square(grid).sum(axis=1).max() > (self.clipping_norm / self._step) ** 2:
            raise ValueError("a vector is longer than the clipping norm")
        return grid.reshape(vectors.shape) * self._step

    @property
    def _step(self) -> float:
        """A power of two: multiples of it add up without rounding."""
        return 2.0 ** (math.floor(math.log2(self.clipping_norm)) - GRID_BITS)


def gaussian_mechanism(settings: PrivacySettings) -> GaussianMechanism | None:
    """The mechanism that a recipe asks for, or None for no guarantee.

    Raises:
        InputError: if its noise is too little for what it claims, as the paper's formula can be above epsilon 1.
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
    """The recipe's delta, or N ** -1.1 for the declared number of records N."""
    if settings.delta is not None:
        return settings.delta
    assert settings.declared_records is not None  # the recipe's validation asked for one of the two
    return settings.declared_records**-1.1


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The smallest delta of the Gaussian mechanism with sigma = noise_multiplier x sensitivity.

    Balle and Wang (2018), theorem 8.
    """
    half, shift = 0.5 / noise_multiplier, epsilon * noise_multiplier
    first, second = log_ndtr(half - shift), epsilon + log_ndtr(-half - shift)
    return float(math.exp(first) * -math.expm1(min(second - first, 0.0)))


#: Rényi orders over which the conversion from zCDP is minimised: dense where small epsilons have their optimum.
ORDERS = tuple((1 + np.geomspace(1e-3, 1e6, 2000)).tolist())


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Epsilon at delta of rho-zero-concentrated differential privacy, by dp-accounting's Rényi accountant."""
    return float(RdpAccountant(orders=ORDERS).compose(ZCDpEvent(rho=rho, xi=0.0)).get_epsilon(delta))


@lru_cache
def discrete_multiplier(epsilon: float, delta: float) -> float:
    """sigma / sensitivity of the discrete Gaussian: the least for which `zcdp_epsilon` is at most epsilon."""
    least = get_sigma_gaussian(epsilon, delta)

    def excess(multiplier: float) -> float:
        return zcdp_epsilon(0.5 / multiplier**2, delta) - epsilon

    multiplier: float = brentq(excess, 0.9 * least, 4 * least, xtol=1e-9 * least)  # pyright: ignore
    while excess(multiplier) > 0:
        multiplier *= 1 + 1e-9
    return multiplier


def discrete_gaussian(shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Integers with probability proportional to exp(-x^2 / (2 scale^2)), exactly, from the system's generator."""
    # Late: an optional dependency.
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian
    from opendp.metrics import l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    sample = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=scale)
    return np.array(sample([0] * math.prod(shape)), dtype=np.int64).reshape(shape)


def system_standard_normal(shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers from the operating system's generator; no state is kept that could repeat them."""
    size = math.prod(shape)
    words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
    # 53 random bits, centred in their cells: uniform on (0, 1) without its ends.
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return ndtri(uniform).reshape(shape)


class Guarantee(Settings):
    """A mechanism's promise, in the words and numbers that every report and release carries."""

    unit: Literal["one record"] = "one record"
    epsilon: float | None
    delta: float | None
    adjacency: str
    clipping_norm: float
    sensitivity: float | None
    sigma: float | None
    calibration: str | None
    accountant: str
    sampler: str | None
    releases: int
    composed_epsilon: float | None
    safe: bool

    @property
    def sentence(self) -> str:
        """One plain sentence. Without an epsilon, or with seeded noise, it says that nothing is guaranteed."""
        if self.epsilon is None:
            return "No privacy guarantee: the target gradient carries no noise, and gradients can give texts away."
        if not self.safe:
            return "UNSAFE, no privacy guarantee: the noise was drawn from a seed, for a test."
        return (
            f"({self.epsilon:g}, {self.delta:.3g})-differential privacy for {self.unit} ({self.adjacency}), "
            f"by one release of a sum with sensitivity {self.sensitivity:g} and Gaussian noise of standard "
            f"deviation {self.sigma:.4g}.{self._together}"
        )

    @property
    def _together(self) -> str:
        if self.releases < 2:
            return ""
        return (
            f" The {self.releases} releases from these data come to epsilon {self.composed_epsilon:.4g} together."
        )


def guarantee(settings: PrivacySettings) -> Guarantee:
    """What a run with these settings guarantees to the people in its data."""
    mechanism = gaussian_mechanism(settings)
    return Guarantee(
        epsilon=settings.epsilon,
        delta=mechanism.delta if mechanism else None,
        adjacency=settings.adjacency,
        clipping_norm=settings.clipping_norm,
        sensitivity=mechanism.sensitivity if mechanism else None,
        sigma=mechanism.sigma if mechanism else None,
        calibration=settings.calibration if mechanism else None,
        accountant=_accountant(mechanism),
        sampler=mechanism.sampler if mechanism else None,
        releases=1,
        composed_epsilon=mechanism.epsilon if mechanism else None,
        safe=mechanism is not None and mechanism.safe,
    )


def _accountant(mechanism: GaussianMechanism | None) -> str:
    if mechanism is None:
        return "none"
    if mechanism.discrete:
        return (
            f"zero-concentrated DP (Canonne, Kamath and Steinke, 2020), dp-accounting {version('dp-accounting')}"
        )
    exact = "analytic Gaussian mechanism (Balle and Wang, 2018)"
    if mechanism.calibration == "paper":
        return f"formula of Dwork and Roth (2014), checked by the {exact}"
    return f"{exact}, dp-accounting {version('dp-accounting')}"
