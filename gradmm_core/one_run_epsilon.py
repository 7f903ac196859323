"""What guesses at many canaries in one release certify: a lower bound on epsilon.

Each canary was in or out by a fair coin (Steinke, Nasr and Jagielski, 2023).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import expit, ndtr
from scipy.stats import binom

from gradmm_core.errors import InputError


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon, at least 0, that `correct` of `guesses` rule out: a lower bound at the confidence.

    Steinke, Nasr and Jagielski (2023), theorem 5.2. At best it is that of all guesses being right.

    Raises:
        InputError: unless 0 <= correct <= guesses <= canaries.
    """
    check_guesses(canaries, guesses, correct)

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    if excess(0.0) > 0:
        return 0.0
    above = 1.0
    while excess(above) <= 0:
        above *= 2
    return float(root_scalar(excess, bracket=(0.0, above), xtol=1e-12).root)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """A bound on the probability that an (epsilon, delta)-DP mechanism has `correct` right guesses or more.

    With W right guesses of randomised response, Binomial(guesses, e^eps / (1 + e^eps)), it is

        P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i,  i = 1, ..., v

    for v correct guesses on m canaries (Steinke, Nasr and Jagielski, 2023, theorem 5.2).
    """
    rate = expit(epsilon)
    reached = float(binom.sf(correct - 1, guesses, rate))
    if correct == 0:
        return reached
    # Those just below v first: the means of the first one, two, ... probabilities.
    below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate)
    means = np.cumsum(below) / np.arange(1, correct + 1)
    return min(1.0, reached + 2 * canaries * delta * float(means.max()))


def expected_correct_guesses(canaries: int, guesses: int, dims: int, noise_multiplier: float) -> float:
    """How many guesses `correct_guesses` gets right on average of a Gaussian mechanism, for many canaries.

    In sensitivities, a score is +1/2 (in) or -1/2 (out), plus noise, plus, where there are more canaries than
    dimensions, the other canaries' parts in its direction: normal, of variance (canaries - 1) / (4 dims).
    """
    check_guesses(canaries, guesses)
    others = (canaries - 1) / (4 * dims) if canaries > dims else 0.0
    deviation = math.sqrt(noise_multiplier**2 + others)
    share = guesses / (2 * canaries)

    def in_and_above(threshold: float) -> float:
        return float(ndtr((0.5 - threshold) / deviation)) / 2

    def excess(threshold: float) -> float:
        return in_and_above(threshold) + float(ndtr((-0.5 - threshold) / deviation)) / 2 - share

    # At 0 half of all scores are above: as many as can be guessed to be in.
    if guesses == canaries:
        threshold = 0.0
    else:
        threshold = float(root_scalar(excess, bracket=(0.0, 0.5 + 40 * deviation)).root)
    return guesses * in_and_above(threshold) / share


def check_guesses(canaries: int, guesses: int, correct: int = 0) -> None:
    """Raises an InputError unless 0 <= correct <= guesses <= canaries, and there is a guess."""
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise InputError(
            f"{correct} right of {guesses} guesses on {canaries} canaries",
            "mechanism_audit",
            "there must be a guess, and no more of them than canaries",
        )
