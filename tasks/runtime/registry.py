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
    "word_tilt": 2,
    "generation_shard": 14,
    "generation": 10,
    "label_filter": 9,
    "loss_selection": 7,
    "category_balance": 3,
    "labelling": 5,
    "arm_eval": 7,
    "finetune_eval": 6,
    "mia_audit": 6,
    "memorisation": 2,
}

#: Stages of studies only.
STUDY_STAGES = {
    "coresets": 1,
    "private_votes": 2,
    "variations": 1,
    "private_means": 3,
    "steered_texts": 1,
    "private_examples": 3,
    "private_adapters": 1,
    "adapted_texts": 1,
    "class_shares": 1,
    "arm_measures": 3,
    "tfidf_eval": 2,
    "compare": 6,
    "scarce": 5,
    "transfer": 5,
    "ablate": 5,
    "scale": 4,
    "epsilon": 6,
    "distribution": 2,
    "gradient_path": 4,
    "gradients": 1,
    "bounds": 1,
}

#: Stages that have a command of their own, and whose results runs only show.
AUDIT_STAGES = {"contamination": 3}

STAGE_VERSIONS = RUN_STAGES | STUDY_STAGES | AUDIT_STAGES
