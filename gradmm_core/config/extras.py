"""Packages that only some recipes need: pip's extras of gradmm."""

from __future__ import annotations

from importlib.util import find_spec

from gradmm.config.recipe import Recipe
from gradmm.config.settings import DEVICE_MAPS, PrivacySettings
from gradmm.errors import InputError


def check_extras(recipe: Recipe) -> None:
    """Check that the packages are installed that a recipe needs.

    Not part of the recipe's validation: records of runs are read on machines without these packages too.

    Raises:
        InputError: for the first that is missing.
    """
    check_sampler(recipe.privacy)
    if recipe.finetune_eval.lora_rank is not None:
        check_installed("peft", "lora", "finetune_eval.lora_rank")
    if recipe.model.device in DEVICE_MAPS:
        check_installed("accelerate", "lora", "model.device")


def check_sampler(settings: PrivacySettings) -> None:
    """Raise an InputError if the package that draws the noise is missing."""
    if settings.sampler == "discrete":
        check_installed("opendp", "discrete", "privacy.sampler")


def check_installed(package: str, extra: str, where: str) -> None:
    """Raise an InputError that names the setting `where` if a package of one of pip's extras is missing."""
    if find_spec(package) is None:
        raise InputError(f"{package} is not installed", where, f"pip install 'gradmm[{extra}]'")
