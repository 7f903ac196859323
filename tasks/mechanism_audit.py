"""Audit the mechanism: put canaries through the clipping and the noise of a release. Reads no private records."""

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
    settings: MechanismAuditSettings,
    seed: int,
) -> Outcome:
    """Audit a run's mechanism before private records are read.

    Raises:
        RuntimeError: if the certified epsilon exceeds the claim.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.audit.canaries import audit_release

    norms = ReleaseNorms.of(mechanism.clipping_norm, probe_share)
    found = audit_release(mechanism, norms, settings, seed)
    if not found.passes:
        raise RuntimeError(
            "the mechanism leaks more than it claims (certified epsilon "
            f"{found.repeated_draws.certified_epsilon:.3g} by repeated draws, "
            f"{found.one_run.certified_epsilon:.3g} in one run, claimed {mechanism.epsilon:g}): "
            "nothing private was read; please report this"
        )
    return found.as_frame(), {
        "claimed_epsilon": mechanism.epsilon,
        "confidence": settings.confidence,
        "draws": found.repeated_draws.draws,
        "certified_epsilon": found.repeated_draws.certified_epsilon,
        "expected_certified_epsilon": found.repeated_draws.expected_certified_epsilon,
        "one_run_certified_epsilon": found.one_run.certified_epsilon,
        "one_run_expected_certified_epsilon": found.one_run.expected_certified_epsilon,
        "auc": found.repeated_draws.auc,
        "tpr_at_1_fpr": found.repeated_draws.tpr_at_1_fpr,
        "tpr_at_01_fpr": found.repeated_draws.tpr_at_01_fpr,
    }
