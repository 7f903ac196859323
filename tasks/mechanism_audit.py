"""The audit that has power: planted canaries through the clipping and the noise of a release. No private data."""

from __future__ import annotations

from gradmm_core.privacy import GaussianMechanism
from gradmm_core.release_norms import ReleaseNorms
from gradmm_core.settings import MechanismAuditSettings
from tasks.stage import Outcome, RunContext, stage_task


@stage_task("mechanism_audit")
def mechanism_audit(
    context: RunContext,
    mechanism: GaussianMechanism,
    probe_share: float,
    settings: MechanismAuditSettings,
    seed: int,
) -> Outcome:
    """Audits the mechanism of a run before anything private goes through it.

    Raises:
        RuntimeError: if it leaks more than it claims.
    """
    # Late, see tasks/stage.py.
    from gradmm_core.canary_release import audit_release

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
