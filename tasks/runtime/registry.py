"""All stages, with the version of each one's code.

The version is part of the stage's cache key. Raise it when a change of the code changes the stage's results.
`tests/flows/test_stages.py` fails when the code that a stage imports has changed, until the change is accepted.
"""

from __future__ import annotations

#: Stages of a run, in order.
RUN_STAGES = {
    "target_space": 3,
    "mechanism_audit": 3,
    "target_gradient": 4,
    "generation_shard": 9,
    "generation": 9,
    "label_filter": 5,
    "loss_selection": 6,
    "category_balance": 3,
    "arm_eval": 2,
    "finetune_eval": 2,
    "mia_audit": 2,
    "memorisation": 1,
}

#: Stages of studies only.
STUDY_STAGES = {
    "coresets": 1,
    "arm_measures": 2,
    "compare": 1,
    "scarce": 1,
    "transfer": 1,
    "ablate": 1,
    "epsilon": 2,
    "distribution": 1,
    "gradient_path": 2,
    "gradients": 1,
    "bounds": 1,
}

STAGE_VERSIONS = RUN_STAGES | STUDY_STAGES
