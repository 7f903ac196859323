"""Fit a naive Bayes classifier of tokens to the released token rates of the classes.

Tokens are sparse: a few distinguish a class, most are uninformative. The noise is the same in all. Each token's
rate is therefore shrunk by its own posterior mean under a prior that all tokens share, a mixture of a point at
zero and normal distributions of growing width, whose weights maximise the likelihood of the released rates
(adaptive shrinkage; Stephens, Biostatistics 2017). Under strong noise the point at zero takes all weight, and the
classifier says nothing.

    u_v            rate in public text: the model's own, of all classes alike, by its document frequencies
    r_v            rate in the records of all classes;  r_v = u_v (1 + eta_v), eta_v shrunk as above
    r_cv           rate in the records of class c;      r_cv = r_v (1 + theta_cv), theta_cv shrunk as above
    pooled_log_v   log(r_v / u_v): how much more often records contain the token than the model writes it
    weights_cv     log(r_cv / r_v): the evidence of the token for the class

Tokens without a weight (see `token_rates`) have no rates and no evidence.

The classifier's score of class c is the sum of weights_cv over the tokens that a text contains, times a slope of
at most 1. Tokens of one text repeat one another's evidence, so their plain sum is overconfident. The slope is
that of a linear discriminant analysis of the score: the difference that the released rates make between the
classes' expected scores, by the variance of the score over public texts. All of it is post-processing of the
release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.privacy.sensitivity import CONSTANT
from gradmm.target.token_rates import TokenSums, token_weights

#: Standard deviations of the prior's components, relative to the rate that is changed.
CLASS_WIDTHS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
POOLED_WIDTHS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

#: Pseudo-counts of the point at zero, so that a likelihood that is nearly flat prefers it.
NULL_TOKENS = 10.0

#: Iterations of expectation-maximisation. Their number is fixed, so that the result depends on the data alone.
ITERATIONS = 100

#: A class's rate of a token is at most this multiple of the pooled one, and at least its inverse. The pooled rate
#: has the same lower bound relative to the public one, because a rate of zero has no logarithm.
MAX_RATIO = 20.0

#: Records with a token that are no evidence for more than themselves, see `_variance`. With 2, labels drawn at
#: random, for 100 of 4,900 records, move no text's log-odds by more than 0.5; without, by up to 9.
FEW_RECORDS = 2


@dataclass(frozen=True, eq=False)
class NaiveBayes:
    """Evidence of tokens for classes; float64, on the CPU.

    Attributes:
        weights: log(r_cv / r_v), with one row per class in the order of the labels; zero without evidence.
        pooled_log_ratios: log(r_v / u_v).
        public: document frequencies in public text; zero for tokens without a weight.
        expected: the mean score of each class (column) of a text of each class (row), by the rates, without slope.
        counts: the released numbers of records of each class.
        count_noise: the standard deviation of the noise in each count.
        slope: the factor of the scores.
    """

    weights: Float[Tensor, "classes vocabulary"]
    pooled_log_ratios: Float[Tensor, " vocabulary"]
    public: Float[Tensor, " vocabulary"]
    expected: Float[Tensor, "classes classes"]
    counts: Float[Tensor, " classes"]
    count_noise: float
    slope: float = 1.0

    @property
    def informative_tokens(self) -> int:
        """The number of tokens that change some class's score by more than 0.1."""
        return int((self.weights.abs() > 0.1).any(dim=0).sum())

    def log_ratios(self, column: int) -> Float[Tensor, " vocabulary"]:
        """Return log(r_cv / u_v): how much more often the class's records contain tokens than public text does."""
        return self.pooled_log_ratios + self.weights[column]

    def scores(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, "texts classes"]:
        """Sum each class's weights over the tokens that each text (token ids) contains; times the slope."""
        return self.slope * torch.stack([self.weights[:, sorted(set(text))].sum(dim=1) for text in texts])

    def with_slope(self, texts: Sequence[Sequence[int]]) -> NaiveBayes:
        """Set the slope by the variance of the scores over public texts of all classes."""
        shares = self.counts / self.counts.sum()

        def deviations(scores: Float[Tensor, "texts classes"]) -> Float[Tensor, "texts classes"]:
            return scores - scores @ shares[:, None]

        expected = deviations(self.expected)
        between = (shares * (expected - shares @ expected).diagonal()).sum()
        variance = (shares * deviations(replace(self, slope=1.0).scores(texts)).var(dim=0)).sum()
        return replace(self, slope=float((between / variance).clamp(0.0, 1.0).nan_to_num(1.0)))


def fit_naive_bayes(released: TokenSums, frequencies: Float[Tensor, " vocabulary"]) -> NaiveBayes:
    """Fit the classifier to released sums, with or without noise.

    Args:
        frequencies: the tokens' document frequencies in public text.
    """
    all_rates, counts, noise = released.class_rates()
    frequencies = frequencies.double()
    weighted = token_weights(frequencies)
    has_weight = weighted > 0
    rates, weighted, public = all_rates[:, has_weight], weighted[has_weight], frequencies[has_weight]
    # A record's vector has entries of about this size where it is not zero, so rates vary like counts of it: the
    # squares of public texts' entries add up to 1.
    entry = weighted / (weighted.square() @ public).sqrt()
    model = public * entry
    total = counts.sum()
    shares = counts / total

    pooled_error = (noise / total) ** 2 * len(counts) + entry * model / total
    eta = shrunk(shares @ rates - model, pooled_error.sqrt(), model, POOLED_WIDTHS)
    pooled = model * (1 + eta).clamp_min(1 / MAX_RATIO)

    weights = []
    for of_class, count, share in zip(rates, counts, shares, strict=True):
        # The others' rate has the noise of all other classes.
        others = total - count
        of_others = (shares @ rates - share * of_class) / (1 - share)
        noises = (noise / count) ** 2 + (noise / others) ** 2 * (len(counts) - 1)
        sampling = _variance(of_class, pooled, entry, count) + _variance(of_others, pooled, entry, others)
        error = (1 - share) * (noises + sampling).sqrt()
        theta = shrunk((1 - share) * (of_class - of_others), error, pooled, CLASS_WIDTHS)
        weights.append((1 + theta).clamp(1 / MAX_RATIO, MAX_RATIO).log())
    evidence = torch.stack(weights)
    presence = pooled * evidence.exp() / entry  # the probability that a text contains the token
    expected = presence @ evidence.mT
    evidence, pooled_log_ratios = (
        each.new_zeros(*each.shape[:-1], len(has_weight)).masked_scatter(has_weight, each)
        for each in (evidence, (pooled / model).log())
    )
    return NaiveBayes(evidence, pooled_log_ratios, frequencies * has_weight, expected, counts, noise / CONSTANT)


def _variance(
    observed: Float[Tensor, " tokens"],
    expected: Float[Tensor, " tokens"],
    entry: Float[Tensor, " tokens"],
    records: Float[Tensor, ""],
) -> Float[Tensor, " tokens"]:
    """Return the sampling variance of rates over some records: of a Poisson count, as expected.

    Where less than a record is expected to contain a token, a normal distribution of that variance would take one
    that does for strong evidence. So the first `FEW_RECORDS` vary as much as they are.
    """
    few = torch.minimum(observed, FEW_RECORDS * entry / records)
    return entry * torch.maximum(expected, few) / records


def shrunk(
    observed: Float[Tensor, " tokens"],
    error: Float[Tensor, " tokens"],
    rate: Float[Tensor, " tokens"],
    widths: Sequence[float],
) -> Float[Tensor, " tokens"]:
    """Estimate theta in `observed` = rate theta + normal error, by its posterior mean.

    The prior of theta is a mixture of normal distributions around zero with the standard deviations `widths`, the
    first of which is zero. Expectation-maximisation finds its weights from all tokens whose rate is large enough
    to tell the components apart.

    Args:
        error: standard deviation of the error.
    """
    spreads = rate[:, None] * torch.tensor(widths, dtype=torch.float64)
    variances = error.square()[:, None] + spreads.square()
    logs = -variances.log() / 2 - observed.square()[:, None] / (2 * variances)
    likelihoods = (logs - logs.amax(dim=1, keepdim=True)).exp()
    prior = torch.zeros(len(widths), dtype=torch.float64)
    prior[0] = NULL_TOKENS
    informative = likelihoods[2 * spreads[:, -1] > error]
    weights = torch.full_like(prior, 1 / len(widths))
    for _ in range(ITERATIONS):
        counts = _posterior(informative, weights).sum(dim=0) + prior
        weights = counts / counts.sum()
    means = spreads * torch.tensor(widths, dtype=torch.float64) * observed[:, None] / variances
    return (_posterior(likelihoods, weights) * means).sum(dim=1)


def _posterior(
    likelihoods: Float[Tensor, "tokens components"], weights: Float[Tensor, " components"]
) -> Float[Tensor, "tokens components"]:
    joint = likelihoods * weights
    return joint / joint.sum(dim=1, keepdim=True)
