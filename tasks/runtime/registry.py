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
    "word_tilt": 1,
    "generation_shard": 12,
    "generation": 9,
    "label_filter": 7,
    "loss_selection": 6,
    "category_balance": 3,
    "labelling": 2,
    "arm_eval": 7,
    "finetune_eval": 6,
    "mia_audit": 5,
    "memorisation": 1,
}

#: Stages of studies only.
STUDY_STAGES = {
    "coresets": 1,
    "private_votes": 2,
    "variations": 1,
    "private_means": 2,
    "steered_texts": 1,
    "private_examples": 1,
    "private_adapters": 1,
    "adapted_texts": 1,
    "class_shares": 1,
    "arm_measures": 3,
    "tfidf_eval": 2,
    "compare": 4,
    "scarce": 4,
    "transfer": 4,
    "ablate": 4,
    "scale": 3,
    "epsilon": 5,
    "distribution": 1,
    "gradient_path": 4,
    "gradients": 1,
    "bounds": 1,
}

#: Stages that have a command of their own, and whose results runs only show.
AUDIT_STAGES = {"contamination": 3}

STAGE_VERSIONS = RUN_STAGES | STUDY_STAGES | AUDIT_STAGES
