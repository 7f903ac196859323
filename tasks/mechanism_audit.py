"""Audit the mechanism: put canaries through the code of a release. Reads no private records.

Every private run audits the code that it runs, so the result is never taken from the cache (`NEVER_CACHED`).
"""

from __future__ import annotations

from gradmm.config.settings import MechanismAuditSettings
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("mechanism_audit")
def mechanism_audit(
    context: RunContext,
    mechanism: GaussianMechanism,
    probe_share: float,
    token_share: float,
    settings: MechanismAuditSettings,
    seed: int,
) -> Outcome:
    """Audit a run's mechanism before private records are read.

    Raises:
        RuntimeError: if a check fails, or the certified epsilon exceeds the claim.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.audits import mechanism_audit as audit

    norms = ReleaseNorms.of(mechanism.clipping_norm, probe_share, token_share)
    found = audit.mechanism_audit(mechanism, norms, settings, seed)
    if not found.passes:
        raise RuntimeError(
            f"the mechanism's audit failed: {'; '.join(found.failed)}. Nothing private was read. A correct "
            f"mechanism fails with a probability of at most {found.false_alarms:.2%}: if this happens "
            "again, please report it"
        )
    noise = found.check("noise")
    return found.as_frame(), {
        "claimed_epsilon": mechanism.epsilon,
        "confidence": found.one_run.confidence,
        "sensitivity": found.check("sensitivity").measured,
        "noise": noise.measured,
        "noise_low": noise.low,
        "noise_high": noise.high,
        "draws": found.repeated_draws.draws,
        "certified_epsilon": found.repeated_draws.certified_epsilon,
        "expected_certified_epsilon": found.repeated_draws.expected_certified_epsilon,
        "one_run_certified_epsilon": found.one_run.certified_epsilon,
        "one_run_expected_certified_epsilon": found.one_run.expected_certified_epsilon,
        "auc": found.repeated_draws.auc,
        "tpr_at_1_fpr": found.repeated_draws.tpr_at_1_fpr,
        "tpr_at_01_fpr": found.repeated_draws.tpr_at_01_fpr,
    }
