"""Check the classifier of tokens: its shrinkage against integrals, and what it learns from rates with noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from gradmm.target.naive_bayes import CLASS_WIDTHS, ITERATIONS, fit_naive_bayes, shrunk
from gradmm.target.token_rates import COMMON, TokenSums, token_presence, token_weights

VOCABULARY = 400
RECORDS = 3000

#: Tokens that records of one class contain more often than those of the other.
TELLING = {0: range(10), 1: range(10, 20)}


def texts_of(label: int, count: int, seed: int, lean: float = 3.0, domain: float = 1.0) -> list[list[int]]:
    """Draw texts of twelve tokens. `domain` multiplies the weight of tokens 20 to 29 in both classes."""
    weights = np.ones(VOCABULARY)
    weights[list(TELLING[label])] = lean
    weights[20:30] = domain
    random = np.random.default_rng(seed)
    return random.choice(VOCABULARY, (count, 12), p=weights / weights.sum()).tolist()


def sums_of(noise: float, lean: float = 3.0, domain: float = 1.0, records: int = RECORDS) -> TokenSums:
    random = torch.Generator().manual_seed(5)
    sums = {}
    for label in (0, 1):
        clean = token_presence(texts_of(label, records, label, lean, domain), token_weights(public())).sum(dim=0)
        sums[label] = clean + noise * torch.randn(VOCABULARY + 1, generator=random).double()
    return TokenSums(sums, noise)


@pytest.mark.parametrize("few", [30, 100])
def test_a_small_class_of_the_same_texts_moves_no_text(few: int) -> None:
    """Single occurrences of rare tokens in a small class are no evidence."""
    random, vocabulary = np.random.default_rng(0), 3000
    shares = 1 / np.arange(1, vocabulary + 1)
    drawn = random.choice(vocabulary, (6000, 20), p=shares / shares.sum()).tolist()
    frequencies = torch.tensor(1 - (1 - shares / shares.sum()) ** 20).clamp_min(1e-4)
    weights = token_weights(frequencies)
    sums = {
        label: torch.stack(
            [token_presence(texts[i : i + 256], weights).sum(dim=0) for i in range(0, len(texts), 256)]
        ).sum(dim=0)
        for label, texts in ((0, drawn[: 4000 - few]), (1, drawn[4000 - few : 4000]))
    }
    scores = fit_naive_bayes(TokenSums(sums), frequencies).with_slope(drawn[5000:]).scores(drawn[4000:5000])
    odds = scores[:, 1] - scores[:, 0]
    assert float(odds.std()) < 0.15
    assert float(odds.abs().max()) < 1


def public() -> torch.Tensor:
    """Document frequencies of texts that do not lean."""
    return torch.full((VOCABULARY,), 1 - (1 - 1 / VOCABULARY) ** 12, dtype=torch.float64)


def accuracy(noise: float) -> float:
    classifier = fit_naive_bayes(sums_of(noise, lean=8.0), public())
    texts = [text for label in (0, 1) for text in texts_of(label, 500, 90 + label, lean=8.0)]
    return float((classifier.scores(texts).argmax(dim=1) == torch.arange(1000) // 500).double().mean())


def slow_shrunk(observed: list[float], error: list[float], rate: list[float]) -> list[float]:
    """The same estimate by numerical integration over theta, component by component."""

    def density(theta: float, width: float, i: int) -> float:
        return float(norm.pdf(theta, 0, width) * norm.pdf(observed[i], rate[i] * theta, error[i]))

    def moment(width: float, i: int, power: int) -> float:
        if width == 0:
            return (0.0**power) * float(norm.pdf(observed[i], 0, error[i]))
        middle = observed[i] / rate[i]
        ends = (min(0.0, middle) - 12 * width, max(0.0, middle) + 12 * width)
        return quad(lambda theta: theta**power * density(theta, width, i), *ends, points=[0.0, middle], limit=400)[
            0
        ]

    tokens = range(len(observed))
    likelihoods = np.array([[moment(width, i, 0) for width in CLASS_WIDTHS] for i in tokens])
    firsts = np.array([[moment(width, i, 1) for width in CLASS_WIDTHS] for i in tokens])
    weights = np.full(len(CLASS_WIDTHS), 1 / len(CLASS_WIDTHS))
    fits = [i for i in tokens if 2 * rate[i] * CLASS_WIDTHS[-1] > error[i]]
    for _ in range(ITERATIONS):
        posterior = likelihoods[fits] * weights
        counts = (posterior / posterior.sum(axis=1, keepdims=True)).sum(axis=0)
        counts[0] += 10
        weights = counts / counts.sum()
    joint = likelihoods * weights
    return ((firsts * weights).sum(axis=1) / joint.sum(axis=1)).tolist()


def test_the_shrunk_value_is_the_posterior_mean_under_the_fitted_prior() -> None:
    observed, error, rate = [0.3, -0.02, 0.0, 1.1, 0.001], [0.1, 0.05, 0.2, 0.3, 0.5], [0.5, 0.4, 0.3, 0.6, 0.01]
    given = torch.tensor([observed, error, rate], dtype=torch.float64)
    found = shrunk(given[0], given[1], given[2], CLASS_WIDTHS)
    assert found.tolist() == pytest.approx(slow_shrunk(observed, error, rate), abs=1e-6)


def test_pure_noise_is_shrunk_to_nothing_and_a_clear_signal_is_kept() -> None:
    random = torch.Generator().manual_seed(0)
    rate, error = torch.full((5000,), 0.01).double(), torch.full((5000,), 0.004).double()
    noise = error * torch.randn(5000, generator=random).double()
    assert float(shrunk(noise, error, rate, CLASS_WIDTHS).abs().mean()) < 0.02
    noise[:50] += 0.03  # theta = 3, at 7 standard deviations
    found = shrunk(noise, error, rate, CLASS_WIDTHS)
    assert float(found[:50].mean()) == pytest.approx(3.0, rel=0.1)
    assert float(found[50:].abs().mean()) < 0.05


def test_the_weights_are_the_logarithms_of_the_ratios_of_rates() -> None:
    classifier = fit_naive_bayes(sums_of(0.0), public())
    # With weights 3 and 1 the pooled rate is 2, up to saturation within a text.
    for label in (0, 1):
        own, other = TELLING[label], TELLING[1 - label]
        assert classifier.weights[label, list(own)].mean() == pytest.approx(math.log(3 / 2), abs=0.05)
        assert classifier.weights[label, list(other)].mean() == pytest.approx(math.log(1 / 2), abs=0.08)
        assert float(classifier.weights[label, 20:].abs().mean()) < 0.02
    assert classifier.counts.tolist() == pytest.approx([RECORDS, RECORDS])
    assert 20 <= classifier.informative_tokens <= 30


def test_the_pooled_rates_find_the_words_of_the_domain() -> None:
    classifier = fit_naive_bayes(sums_of(0.0, domain=4.0), public())
    assert classifier.pooled_log_ratios[20:30].mean() == pytest.approx(
        math.log(4 / (1 + 30 / VOCABULARY)), abs=0.1
    )
    torch.testing.assert_close(classifier.log_ratios(1), classifier.pooled_log_ratios + classifier.weights[1])


def test_noise_takes_away_what_it_drowns_and_nothing_else() -> None:
    clean, noisy, drowned = (accuracy(noise) for noise in (0.0, 4.0, 1e6))
    assert clean > 0.85
    assert 0.8 < noisy <= clean + 0.01
    assert drowned == 0.5  # all scores are equal
    classifier = fit_naive_bayes(sums_of(1e6), public())
    assert float(classifier.weights.abs().max()) < 1e-3
    assert float(classifier.pooled_log_ratios.abs().max()) < 1e-2


def test_repeated_evidence_lowers_the_slope() -> None:
    """Where tokens come in pairs, the plain sum counts each of them twice."""
    classifier = fit_naive_bayes(sums_of(0.0), public())
    texts = [text for label in (0, 1) for text in texts_of(label, 1000, 50 + label)]
    independent = classifier.with_slope(texts)
    assert 0.7 < independent.slope < 1
    doubled = {label: {token: token + 200 for token in TELLING[label]} for label in (0, 1)}
    pairs = doubled[0] | doubled[1]
    weights = classifier.weights.clone()
    for token, twin in pairs.items():
        weights[:, twin] = weights[:, token]
    twins = [[*text, *(pairs[token] for token in text if token in pairs)] for text in texts]
    paired = replace(classifier, weights=weights, expected=2 * classifier.expected)
    assert paired.with_slope(twins).slope == pytest.approx(independent.slope / 2, rel=0.1)
    assert torch.equal(
        paired.with_slope(twins).scores(twins[:3]), paired.with_slope(twins).slope * paired.scores(twins[:3])
    )


def test_a_classifier_without_evidence_has_scores_of_zero() -> None:
    classifier = fit_naive_bayes(sums_of(1e9), public()).with_slope([[1, 2], [3]])
    assert 0 <= classifier.slope <= 1
    assert classifier.scores([[1, 2], []]).abs().max() < 1e-3


def test_a_common_token_has_no_rate_and_no_evidence() -> None:
    frequencies = public()
    frequencies[[3, 25]] = COMMON
    sums = {}
    for label in (0, 1):
        sums[label] = token_presence(texts_of(label, RECORDS, label), token_weights(frequencies)).sum(dim=0)
        assert not sums[label][[3, 25]].any()
    classifier = fit_naive_bayes(TokenSums(sums), frequencies)
    found = torch.cat([classifier.weights, classifier.pooled_log_ratios[None], classifier.public[None]])
    assert not found[:, [3, 25]].any()
    others = [token for token in TELLING[0] if token != 3]
    assert classifier.weights[0, others].mean() == pytest.approx(math.log(3 / 2), abs=0.05)
    assert classifier.scores([[3, 25]]).tolist() == [[0.0, 0.0]]
    assert torch.isfinite(classifier.expected).all()
