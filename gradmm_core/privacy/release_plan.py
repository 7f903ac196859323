"""Resolve what one run releases: once, from the recipe, before any data are read."""

from __future__ import annotations

from gradmm.config.recipe import Recipe
from gradmm.config.settings import Settings, TargetGradientSettings
from gradmm.privacy.mechanism import GaussianMechanism, gaussian_mechanism
from gradmm.privacy.sensitivity import ReleaseNorms, with_parts_that_fit


class ReleasePlan(Settings):
    """The mechanism and the settings of one release.

    Attributes:
        mechanism: adds the noise; None in a run without privacy.
        target: the recipe's `target_gradient`, with "auto" resolved, and without the parts that the noise would
            drown.
        clipping_norm: C, the largest norm of one record's whole vector.
        declared_records: the public size of the data set; None if it is not declared.
    """

    mechanism: GaussianMechanism | None
    target: TargetGradientSettings
    clipping_norm: float
    declared_records: int | None

    @property
    def norms(self) -> ReleaseNorms:
        """The largest norm of each part of one record's vector."""
        return ReleaseNorms.of_target(self.clipping_norm, self.target)

    @property
    def charged(self) -> bool:
        """Whether the release is charged to the ledger: it has noise, and the noise is not seeded."""
        return self.mechanism is not None and self.mechanism.safe


def release_plan(recipe: Recipe) -> ReleasePlan:
    """Derive the release of a recipe from its public settings only.

    Raises:
        InputError: if the noise is too small for the guarantee, see `gaussian_mechanism`.
    """
    privacy = recipe.privacy
    mechanism = gaussian_mechanism(privacy)
    return ReleasePlan(
        mechanism=mechanism,
        target=with_parts_that_fit(
            recipe.target_gradient,
            privacy.clipping_norm,
            mechanism and mechanism.sigma,
            privacy.declared_records,
            len(recipe.classes),
        ),
        clipping_norm=privacy.clipping_norm,
        declared_records=privacy.declared_records,
    )
