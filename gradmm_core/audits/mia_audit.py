"""Run the paper's membership-inference attack on a model fine-tuned on the synthetic texts, and state its power.

The attacker calls a record a member (a record that the target gradient was computed from) if the fine-tuned
model's response loss on it is low (Yeom et al. 2018). The advantage is TPR - FPR.

Under (eps, delta)-DP, the hypothesis-testing region of Kairouz, Oh and Viswanath (2015) bounds every attack by
TPR <= e^eps FPR + delta and 1 - FPR <= e^eps (1 - TPR) + delta. The largest advantage in the region,

    (e^eps - 1 + 2 delta) / (e^eps + 1)          (Humphries et al. 2023),

is reached at a single point, where TPR = 1 - FPR. There the number of correct guesses among n members and n
non-members is Binomial(2n, (1 + advantage) / 2), so the power of a test on it is exact.

Each run splits the same records differently. The spread over runs measures the effect of the split, not the
uncertainty of the result. This is the weaker of the two privacy audits; `power` quantifies how weak it is.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import expit
from scipy.stats import beta, binom

from gradmm.config.settings import MiaAuditSettings
from gradmm.errors import InputError
from gradmm.metrics.roc import RocFigures, roc_figures, roc_points, tpr_within

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

#: False positive rates at which a row's `roc` gives the true positive rates.
ROC_RATES = np.arange(101) / 100

SIGNIFICANCE = 0.05
DETECTION_POWER = 0.8

#: Members, and non-members, that an attack needs: two to set the threshold, and two under attack.
MIN_RECORDS = 4


class AttackFigures(RocFigures):
    """The advantage at a threshold, and the ROC figures."""

    advantage: float


def mia_audit(
    member_losses: Float[np.ndarray, " members"],
    non_member_losses: Float[np.ndarray, " non_members"],
    settings: MiaAuditSettings,
    seed: int,
    epsilon: float | None,
    delta: float = 0.0,
) -> pd.DataFrame:
    """Attack the records `settings.runs` times, each time with a different random split.

    A run sets the threshold on `threshold_records` members and as many non-members, and applies it to
    `test_records` other members and as many other non-members. If there are too few records, each part takes half.

    Args:
        member_losses: response losses (nats) of the records that the target gradient was computed from.
        non_member_losses: response losses (nats) of unused records from the same source.
        epsilon, delta: the claim; `epsilon=None` for no claim.

    Returns:
        One row per run, with the columns `COLUMNS`. `threshold` is the largest loss that is called a member's.
        `advantage`, `auc`, `tpr_at_1_fpr` and `tpr_at_01_fpr` are measured on the test part. An FPR of 0.1% needs
        1,000 non-members and an FPR of 1% needs 100; with fewer, the TPR is that without any false positive.
        `roc` gives the TPRs at the FPRs `ROC_RATES`. For `power` (NaN without a claim) and `detectable_advantage`
        see the functions `audit_power` and `detectable_advantage`. `test_records` counts the test part's members;
        it has as many non-members.

    Raises:
        InputError: if a loss is not finite, or for fewer than four members or non-members.
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
                "roc": tpr_within(ROC_RATES, *(-losses for losses in attacked)),
                "power": power,
                "detectable_advantage": detectable_advantage(test_records),
                "test_records": test_records,
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def best_threshold(
    member_losses: Float[np.ndarray, " members"], non_member_losses: Float[np.ndarray, " non_members"]
) -> float:
    """Find the loss with the largest advantage if all losses up to it are called members'."""
    false_positives, true_positives, scores = roc_points(-member_losses, -non_member_losses)
    # The first point calls nobody a member and is no loss. The last calls everybody one; its advantage is 0 too.
    best = 1 + np.argmax((true_positives - false_positives)[1:])
    return float(-scores[best])


def attack(
    member_losses: Float[np.ndarray, " members"],
    non_member_losses: Float[np.ndarray, " non_members"],
    threshold: float,
) -> AttackFigures:
    """Compute the advantage at a threshold, and the ROC figures of calling low losses members'."""
    advantage = float(np.mean(member_losses <= threshold) - np.mean(non_member_losses <= threshold))
    return AttackFigures(advantage=advantage, **roc_figures(-member_losses, -non_member_losses))


def largest_advantage(epsilon: float, delta: float) -> float:
    """Compute (e^eps - 1 + 2 delta) / (e^eps + 1), the tight bound on the advantage under (eps, delta)-DP."""
    return math.tanh(epsilon / 2) + 2 * delta * float(expit(-epsilon))


def audit_power(advantage: float, records: int) -> float:
    """Compute the power of a one-sided 5% test on `records` members and as many non-members to see `advantage`.

    The power is exact for an attack with TPR = 1 - FPR whose best threshold is known; having to find it can only
    reduce the power. The test rejects "no advantage" if there are too many correct guesses for
    Binomial(2 records, 1/2). For an attack with TPR = FPR != 1/2 the number of correct guesses varies less, so the
    test's error stays below 5%.
    """
    guesses = 2 * records
    return float(binom.sf(_critical_guesses(guesses) - 1, guesses, (1 + advantage) / 2))


def detectable_advantage(records: int) -> float:
    """Compute the smallest advantage that the test of `audit_power` sees with 80% power; NaN if there is none.

    It is about 2.49 / sqrt(2 records), by the normal approximation to a difference of two proportions.
    """
    guesses = 2 * records
    critical = _critical_guesses(guesses)
    # P(Binomial(n, p) >= c) is the distribution function of Beta(c, n - c + 1) at p; NaN for c = n + 1.
    return 2 * float(beta.ppf(DETECTION_POWER, critical, guesses - critical + 1)) - 1


def summarise(frame: pd.DataFrame) -> dict[str, float | int | None]:
    """Compute means and sample standard deviations over the runs (0 for one run), and the power. None for NaN."""
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
    if available < MIN_RECORDS:
        raise InputError(
            f"{members} members and {non_members} non-members are too few to attack",
            "mia_audit",
            f"the attack needs {MIN_RECORDS} of each",
        )
    if available < settings.threshold_records + settings.test_records:
        return available // 2, available // 2
    return settings.threshold_records, settings.test_records


def _critical_guesses(guesses: int) -> int:
    """Compute the smallest number of correct guesses that coin flips reach with probability at most 5%."""
    return int(binom.isf(SIGNIFICANCE, guesses, 0.5)) + 1
