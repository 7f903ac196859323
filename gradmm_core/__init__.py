"""Synthetic training sentences from private labelled text, with a differential-privacy guarantee.

Packages, roughly from low to high; `pyproject.toml` has the order in which they may import. `tasks`, `flows` and
`deployments` lie beside this folder in the repository, and are installed below it:

    errors      errors that a user can act on
    threads     how torch computes: threads, and products of float32 matrices
    config      recipes and their settings
    storage     files and objects under a root: stages' Parquets, schemas, redacted errors
    demo        the embedded corpus and the embedded model
    data        reading labelled texts, and drawing from them
    metrics     figures about texts and about means over seeds
    lm          the language model: tokens, prompts, sampling, classification
    gradients   gradients of examples in closed form, and the matching loss
    privacy     the mechanism, its sensitivity, the guarantee, the ledger
    audits      attacks on the mechanism and on fine-tuned models
    target      the gradient that texts are to match, and the probe and token rates released with it
    filters     choosing among generated texts
    generation  writing texts: as the model does, by search, by ADMM
    labelling   class probabilities of texts, from the model and from the release
    rivals      other methods that release texts under a guarantee, for comparisons
    evaluation  fine-tuning on texts and measuring the model
    in_memory   the stages one by one in memory, for research
    outputs     a run's folder: record, release, report, plots
    studies     comparisons, ablations and theory; no run needs them
    tasks       a Prefect task for each stage
    flows       the flow of a run, and those of studies
    deployments the command line, served deployments, the recipes that come with the package

The names below are the public surface. They are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradmm.config.loading import load_recipe
    from gradmm.config.recipe import Recipe
    from gradmm.data.splits import LabelledTexts, load_splits
    from gradmm.deployments.api import Distillation, distil
    from gradmm.deployments.recipe_files import find_recipe
    from gradmm.errors import InputError
    from gradmm.in_memory import Target, TextAudit, audit, filter_texts, generate, label, target_gradient
    from gradmm.lm.loading import load_language_model
    from gradmm.outputs.record import RunRecord
    from gradmm.privacy.guarantee import Guarantee
    from gradmm.privacy.ledger import Ledger
    from gradmm.privacy.mechanism import GaussianMechanism
    from gradmm.privacy.release_plan import ReleasePlan, release_plan

__all__ = [
    "Distillation",
    "GaussianMechanism",
    "Guarantee",
    "InputError",
    "LabelledTexts",
    "Ledger",
    "Recipe",
    "ReleasePlan",
    "RunRecord",
    "Target",
    "TextAudit",
    "audit",
    "distil",
    "filter_texts",
    "find_recipe",
    "generate",
    "label",
    "load_language_model",
    "load_recipe",
    "load_splits",
    "release_plan",
    "target_gradient",
]

_MODULES = {
    "Distillation": "gradmm.deployments.api",
    "GaussianMechanism": "gradmm.privacy.mechanism",
    "Guarantee": "gradmm.privacy.guarantee",
    "InputError": "gradmm.errors",
    "LabelledTexts": "gradmm.data.splits",
    "Ledger": "gradmm.privacy.ledger",
    "Recipe": "gradmm.config.recipe",
    "ReleasePlan": "gradmm.privacy.release_plan",
    "RunRecord": "gradmm.outputs.record",
    "Target": "gradmm.in_memory",
    "TextAudit": "gradmm.in_memory",
    "audit": "gradmm.in_memory",
    "distil": "gradmm.deployments.api",
    "filter_texts": "gradmm.in_memory",
    "find_recipe": "gradmm.deployments.recipe_files",
    "generate": "gradmm.in_memory",
    "label": "gradmm.in_memory",
    "load_language_model": "gradmm.lm.loading",
    "load_recipe": "gradmm.config.loading",
    "load_splits": "gradmm.data.splits",
    "release_plan": "gradmm.privacy.release_plan",
    "target_gradient": "gradmm.in_memory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gradmm' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
