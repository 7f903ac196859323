"""Audit the mechanism: put canaries through the code of a release. Reads no private records.

Every private run audits the code that it runs, so the result is never taken from the cache (`NEVER_CACHED`).
"""

from __future__ import annotations

from gradmm.config.settings import MechanismAuditSettings, TargetGradientSettings
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.tasks.runtime.stage_task import Outcome, RunContext, stage_task


@stage_task("mechanism_audit")
def mechanism_audit(
    context: RunContext,
    mechanism: GaussianMechanism,
    target: TargetGradientSettings,
    settings: MechanismAuditSettings,
    seed: int,
) -> Outcome:
    """Audit a run's mechanism before private records are read.

    Args:
        target: says which parts a record's vector has.

    Raises:
        RuntimeError: if a check fails, or the certified epsilon exceeds the claim.
    """
    # Imported here: see tasks/runtime/stage_task.py.
    from gradmm.audits import mechanism_audit as audit

    norms = ReleaseNorms.of_target(mechanism.clipping_norm, target)
    found = audit.mechanism_audit(mechanism, norms, settings, seed)
    found.require_pass()
    return found.as_frame(), found.figures
