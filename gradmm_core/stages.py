"""The stages in their order, and the version of the code behind each.

A stage's version is part of its cache key: raise it when a change of the stage's code changes its results.
`tests/core/test_stages.py` fails if one of the modules changes and the version does not.
"""

from __future__ import annotations

from dataclasses import dataclass

_MODEL = ("language_model", "template", "head_gradient")
_SCORING = (*_MODEL, "classification")


@dataclass(frozen=True)
class Stage:
    """`modules` of gradmm_core decide the stage's result."""

    version: int
    modules: tuple[str, ...]


STAGES: dict[str, Stage] = {
    "target_gradient": Stage(1, (*_MODEL, "data", "privacy", "full_gradient", "target_gradient")),
    "generation_shard": Stage(
        1,
        (
            *_MODEL,
            "matching",
            "full_gradient",
            "vocabulary",
            "projection",
            "admm",
            "perplexity",
            "generation",
        ),
    ),
    "generation": Stage(1, ()),
    "label_filter": Stage(1, (*_SCORING, "label_filter")),
    "loss_selection": Stage(1, ("loss_selection",)),
    "category_balance": Stage(1, ("category_balance",)),
    "finetune_eval": Stage(1, (*_SCORING, "data", "finetune_eval")),
    "mia_audit": Stage(1, (*_SCORING, "data", "finetune_eval", "mia_audit")),
}
