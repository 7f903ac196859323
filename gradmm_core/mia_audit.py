"""The paper's membership-inference attack on a model fine-tuned on the synthetic texts, with its power.

The attacker calls a record a member (one of those that the target gradient was made of) if the fine-tuned
model's response loss on it is low (Yeom et al. 2018). The advantage is TPR - FPR.

What (eps, delta)-DP allows: the hypothesis-testing region of Kairouz, Oh and Viswanath (2015) bounds every
attack by TPR <= e^eps FPR + delta and 1 - FPR <= e^eps (1 - TPR) + delta. Its largest advantage,

    (e^eps - 1 + 2 delta) / (e^eps + 1)          (Humphries et al. 2023),

is reached at one point only, where TPR = 1 - FPR. There the number of right guesses among n members and n
non-members is Binomial(2n, (1 + advantage) / 2), which makes the power of a test on them exact.

The runs split the same records anew: their spread says how much the split matters, not how sure the result
is. Of this product's audits this is the weak one; `power` says how weak.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import expit
from scipy.stats import beta, binom
from sklearn.metrics import roc_auc_score, roc_curve

from gradmm_core.errors import InputError
from gradmm_core.settings import MiaAuditSettings

COLUMNS = [
    "run",
    "threshold",
    "advantage",
    "auc",
    "tpr_at_1_fpr",
    "tpr_at_01_fpr",
    "roc",
    "power",
    "detectable_advantage",
    "test_records",
]

#: False positive rates at which a row's `roc` has the true positive rates.
ROC_RATES = np.arange(101) / 100

SIGNIFICANCE = 0.05
DETECTION_POWER = 0.8


def mia_audit(
    member_losses: Float[np.ndarray, " members"],
    non_member_losses: Float[np.ndarray, " non_members"],
    settings: MiaAuditSettings,
    seed: int,
    epsilon: float | None,
    delta: float = 0.0,
) -> pd.DataFrame:
    """Attacks the records `settings.runs` times, each time with another random split.

    A run sets the threshold on `threshold_records` members and as many non-members, and attacks
    `test_records` others of each with it. Where there are too few for both, each part takes half.

    Args:
        member_losses: response losses (nats) of the records that the target gradient was made of.
        non_member_losses: those of records that nothing was made of, from the same source.
        epsilon, delta: the claim; `epsilon=None` for none.

    Returns:
        A row for each run, with the columns `COLUMNS`: the largest loss that is called a member's
        (`threshold`); then, all on the test part, the advantage, the AUC, and the largest TPR at an FPR of at
        most 1% and 0.1%. An FPR of 0.1% needs 1,000 non-members: with fewer it is the TPR at no false
        positive at all (and so is that at 1% with fewer than 100). `roc` is the whole curve so, at the FPRs of
        `ROC_RATES`. `power` is NaN without a claim; see
        `audit_power` and `detectable_advantage`. `test_records` counts the members of the test part, which
        has as many non-members.

    Raises:
        InputError: if a loss is not finite, or with fewer than four members or non-members.
    """
    if not (np.isfinite(member_losses).all() and np.isfinite(non_member_losses).all()):
        raise InputError(
            "the fine-tuned model has losses that are not finite",
            "mia_audit",
            "remove the largest of finetune_eval.learning_rates",
        )
    threshold_records, test_records = _part_sizes(len(member_losses), len(non_member_losses), settings)
    power = math.nan if epsilon is None else audit_power(largest_advantage(epsilon, delta), test_records)
    rng = np.random.default_rng(seed)
    rows = []
    for run in range(settings.runs):
        members, non_members = rng.permutation(member_losses), rng.permutation(non_member_losses)
        threshold = best_threshold(members[:threshold_records], non_members[:threshold_records])
        test_part = slice(threshold_records, threshold_records + test_records)
        attacked = members[test_part], non_members[test_part]
        rows.append(
            {
                "run": run,
                "threshold": threshold,
                **attack(*attacked, threshold),
                "roc": tpr_within(ROC_RATES, *attacked),
                "power": power,
                "detectable_advantage": detectable_advantage(test_records),
                "test_records": test_records,
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def best_threshold(
    member_losses: Float[np.ndarray, " members"], non_member_losses: Float[np.ndarray, " non_members"]
) -> float:
    """The loss that has the largest advantage when all losses up to it are called members'."""
    false_positives, true_positives, scores = _roc(member_losses, non_member_losses)
    # The first point, which calls nobody a member, is no loss; the last, everybody, has its advantage of 0.
    best = 1 + np.argmax((true_positives - false_positives)[1:])
    return float(-scores[best])


def attack(
    member_losses: Float[np.ndarray, " members"],
    non_member_losses: Float[np.ndarray, " non_members"],
    threshold: float,
) -> dict[str, float]:
    """Advantage at a threshold, AUC, and the TPR at low FPR."""
    labels, scores = _labels_and_scores(member_losses, non_member_losses)
    at_1, at_01 = tpr_within(np.array([0.01, 0.001]), member_losses, non_member_losses)
    return {
        "advantage": float(np.mean(member_losses <= threshold) - np.mean(non_member_losses <= threshold)),
        "auc": float(roc_auc_score(labels, scores)),
        "tpr_at_1_fpr": at_1,
        "tpr_at_01_fpr": at_01,
    }


def tpr_within(
    rates: Float[np.ndarray, " rates"],
    member_losses: Float[np.ndarray, " members"],
    non_member_losses: Float[np.ndarray, " non_members"],
) -> list[float]:
    """For each rate the largest TPR with an FPR of at most so much."""
    false_positives, true_positives, _ = _roc(member_losses, non_member_losses)
    return true_positives[false_positives.searchsorted(rates, side="right") - 1].tolist()


def largest_advantage(epsilon: float, delta: float) -> float:
    """(e^eps - 1 + 2 delta) / (e^eps + 1): no attack on (eps, delta)-DP has more, nor can it be bettered."""
    return math.tanh(epsilon / 2) + 2 * delta * float(expit(-epsilon))


def audit_power(advantage: float, records: int) -> float:
    """The probability that a one-sided 5% test on `records` members and as many non-members sees `advantage`.

    Exact, for an attack with TPR = 1 - FPR and the best threshold known (finding it can only cost power).
    The test rejects "no advantage" when right guesses are too many for Binomial(2 records, 1/2); an attack
    with TPR = FPR elsewhere spreads less, so that its error stays below 5%.
    """
    guesses = 2 * records
    return float(binom.sf(_critical_guesses(guesses) - 1, guesses, (1 + advantage) / 2))


def detectable_advantage(records: int) -> float:
    """The smallest advantage that the test of `audit_power` sees with 80% power. NaN if it sees none at all.

    About 2.49 / sqrt(2 records), as the normal approximation to a difference of two proportions has it.
    """
    guesses = 2 * records
    critical = _critical_guesses(guesses)
    # P(Binomial(n, p) >= c) is the distribution function of Beta(c, n - c + 1) at p; for c = n + 1 there is none.
    return 2 * float(beta.ppf(DETECTION_POWER, critical, guesses - critical + 1)) - 1


def summarise(frame: pd.DataFrame) -> dict[str, float | int | None]:
    """Mean and sample standard deviation over the runs (0 for one run), and what they share. None for NaN."""
    figures: dict[str, float | int | None] = {}
    for name in ("advantage", "auc", "tpr_at_1_fpr", "tpr_at_01_fpr"):
        values = frame[name].tolist()
        figures[name] = statistics.fmean(values)
        figures[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
    for name in ("power", "detectable_advantage"):
        value = frame[name].tolist()[0]
        figures[name] = None if pd.isna(value) else value
    figures["test_records"] = int(frame["test_records"].iloc[0])
    return figures


def _part_sizes(members: int, non_members: int, settings: MiaAuditSettings) -> tuple[int, int]:
    available = min(members, non_members)
    if available < 4:
        raise InputError(
            f"{members} members and {non_members} non-members are too few to attack",
            "mia_audit",
            "the attack needs four of each",
        )
    if available < settings.threshold_records + settings.test_records:
        return available // 2, available // 2
    return settings.threshold_records, settings.test_records


def _critical_guesses(guesses: int) -> int:
    """The smallest number of right guesses that a coin reaches with a probability of at most 5%."""
    return int(binom.isf(SIGNIFICANCE, guesses, 0.5)) + 1


def _roc(
    member_losses: Float[np.ndarray, " members"], non_member_losses: Float[np.ndarray, " non_members"]
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"], Float[np.ndarray, " points"]]:
    """FPR, TPR and score (the negative loss) at each point, from the one that calls nobody a member."""
    labels, scores = _labels_and_scores(member_losses, non_member_losses)
    return roc_curve(labels, scores, drop_intermediate=False)


def _labels_and_scores(
    member_losses: Float[np.ndarray, " members"], non_member_losses: Float[np.ndarray, " non_members"]
) -> tuple[np.ndarray, Float[np.ndarray, " records"]]:
    labels = np.repeat([1, 0], [len(member_losses), len(non_member_losses)])
    return labels, -np.concatenate([member_losses, non_member_losses])
