"""Certify a lower bound on epsilon from guesses about many canaries in one release.

Each canary is in or out by a fair coin (Steinke, Nasr and Jagielski, 2023).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import expit, ndtr
from scipy.stats import binom

from gradmm.errors import InputError


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Compute the largest epsilon, at least 0, that `correct` of `guesses` rule out at the given confidence.

    It is a lower bound on the true epsilon (Steinke, Nasr and Jagielski, 2023, theorem 5.2).

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
    """Bound the probability of `correct` or more correct guesses on an (epsilon, delta)-DP mechanism.

    With W ~ Binomial(guesses, e^eps / (1 + e^eps)), the correct guesses on randomised response, the bound is

        P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i,  i = 1, ..., v

    for v correct guesses on m canaries (Steinke, Nasr and Jagielski, 2023, theorem 5.2).
    """
    rate = expit(epsilon)
    reached = float(binom.sf(correct - 1, guesses, rate))
    if correct == 0:
        return reached
    # P[W = v - 1], P[W = v - 2], ...; then the means of the first i of them.
    below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate)
    means = np.cumsum(below) / np.arange(1, correct + 1)
    return min(1.0, reached + 2 * canaries * delta * float(means.max()))


def expected_correct_guesses(canaries: int, guesses: int, deviation: float) -> float:
    """Compute the expected result of `correct_guesses` on a Gaussian mechanism, for many orthogonal canaries.

    Args:
        deviation: of a score's noise, in units of the difference between a canary in and out.
    """
    check_guesses(canaries, guesses)
    share = guesses / (2 * canaries)

    def in_and_above(threshold: float) -> float:
        return float(ndtr((0.5 - threshold) / deviation)) / 2

    def excess(threshold: float) -> float:
        return in_and_above(threshold) + float(ndtr((-0.5 - threshold) / deviation)) / 2 - share

    # With a guess on every canary, half of them are guessed in, and half of the scores are above 0.
    if guesses == canaries:
        threshold = 0.0
    else:
        threshold = float(root_scalar(excess, bracket=(0.0, 0.5 + 40 * deviation)).root)
    return guesses * in_and_above(threshold) / share


def check_guesses(canaries: int, guesses: int, correct: int = 0) -> None:
    """Raise an InputError unless 0 <= correct <= guesses <= canaries and guesses >= 1."""
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise InputError(
            f"{correct} of {guesses} guesses on {canaries} canaries are correct",
            "mechanism_audit",
            "make at least one guess, and at most one for each canary",
        )
