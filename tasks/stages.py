"""The stages in their order, and the version of the code behind each.

A stage's version is part of its cache key: raise it when a change of the stage's code changes its results.
`tests/pipeline/test_stages.py` fails if one of the modules changes and the version does not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """`modules`: those that decide the stage's result, by their dotted names."""

    version: int
    modules: tuple[str, ...]


def _core(*names: str) -> tuple[str, ...]:
    return tuple(f"gradmm_core.{name}" for name in names)


_MODEL = _core(
    "model_reference",
    "wording",
    "frozen_product",
    "last_positions",
    "language_model",
    "template",
    "head_gradient",
    "matching_loss",
)
_SPACE = _core(
    "vocabulary",
    "opening",
    "public_text",
    "release_norms",
    "text_features",
    "probe",
    "target_space",
    "target_table",
)
_FILTERS = _core("filters", "variety")
_FULL_GRADIENT = _core("full_gradient", "matching")
_SCORING = (*_MODEL, *_core("classification"))
_FINETUNING = (*_SCORING, *_FILTERS, *_core("data", "finetune_eval"), "tasks.finetuning")

_ARMS = (*_core("arms"), "tasks.arm_texts")
_COMPARING = (*_FINETUNING, *_core("arms", "compare", "intervals"))
_PATHS = (*_FINETUNING, *_ARMS, *_core("mean_gradient", "gradient_path"))

_GENERATION = (
    *_MODEL,
    *_FULL_GRADIENT,
    *_SPACE,
    *_core(
        "matching_loss",
        "projection",
        "admm",
        "search",
        "readable",
        "sentence_ends",
        "compute_meter",
        "memory",
        "perplexity",
        "shards",
        "generation",
    ),
    *_FILTERS,
    "tasks.generation",
    "tasks.matched_target",
)

STAGES: dict[str, Stage] = {
    "target_space": Stage(3, (*_MODEL, *_SPACE, "tasks.target_space")),
    "target_gradient": Stage(
        3,
        (
            *_MODEL,
            *_FULL_GRADIENT,
            *_SPACE,
            *_core("clipped_sum", "data", "privacy", "target_gradient", "unfinished_sums"),
            "tasks.target_gradient",
        ),
    ),
    "generation_shard": Stage(9, _GENERATION),
    "generation": Stage(9, _GENERATION),
    "label_filter": Stage(
        5,
        (
            *_SCORING,
            *_FILTERS,
            *_SPACE,
            *_core("label_filter"),
            "tasks.label_filter",
            "tasks.matched_target",
        ),
    ),
    "loss_selection": Stage(
        5,
        (
            *_MODEL,
            *_FILTERS,
            *_SPACE,
            *_core("target_set", "loss_selection"),
            "tasks.loss_selection",
            "tasks.matched_target",
        ),
    ),
    "category_balance": Stage(3, (*_FILTERS, *_core("category_balance"), "tasks.category_balance")),
    "finetune_eval": Stage(2, (*_FINETUNING, "tasks.finetune_eval")),
    "mechanism_audit": Stage(
        2,
        (
            *_core(
                "canary_release",
                "certified_epsilon",
                "clipped_sum",
                "head_gradient",
                "matching_loss",
                "mechanism_audit",
                "mia_audit",
                "one_run_epsilon",
                "privacy",
                "release_norms",
            ),
            "tasks.mechanism_audit",
        ),
    ),
    "memorisation": Stage(1, (*_FILTERS, *_core("data", "memorisation"), "tasks.memorisation")),
    "coresets": Stage(1, (*_SCORING, *_core("coresets", "data"), "tasks.coresets")),
    "arm_eval": Stage(2, (*_FINETUNING, *_ARMS, "tasks.arm_eval")),
    "arm_measures": Stage(2, (*_FINETUNING, *_ARMS, *_core("distribution", "perplexity"), "tasks.arm_measures")),
    "compare": Stage(1, (*_COMPARING, "tasks.compare")),
    "scarce": Stage(1, (*_COMPARING, "tasks.scarce")),
    "transfer": Stage(1, (*_COMPARING, "tasks.transfer")),
    "ablate": Stage(1, (*_COMPARING, "tasks.ablate")),
    "epsilon": Stage(2, (*_COMPARING, *_core("target_cosine"), "tasks.epsilon")),
    "distribution": Stage(1, (*_COMPARING, "tasks.arm_texts", *_core("distribution"), "tasks.distribution")),
    "gradient_path": Stage(2, (*_PATHS, "tasks.gradient_path")),
    "gradients": Stage(1, (*_PATHS, *_core("gradient_table", "intervals"), "tasks.gradients")),
    "bounds": Stage(1, (*_PATHS, *_core("gradient_bounds", "gradient_table", "intervals"), "tasks.bounds")),
    "mia_audit": Stage(2, (*_FINETUNING, *_core("mia_audit"), "tasks.mia_audit")),
}

#: Those that a run has not.
OF_STUDIES = (
    "coresets",
    "arm_measures",
    "compare",
    "scarce",
    "transfer",
    "ablate",
    "epsilon",
    "distribution",
    "gradient_path",
    "gradients",
    "bounds",
)
