"""Plant bugs in the code of a release, and see that the audit finds them, at every epsilon, by the expected tests.

docs/privacy/audits.md has the same table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradmm.audits.mechanism_audit import MechanismAudit, mechanism_audit
from gradmm.config.settings import MechanismAuditSettings
from gradmm.gradients.head_gradient import HeadGradients
from gradmm.privacy import clipped_sum
from gradmm.privacy import mechanism as mechanism_module
from gradmm.privacy.clipped_sum import ClippedSum, RecordSums, RecordVectors
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.target import target_gradient
from gradmm.target.target_gradient import TargetSums
from tests.conftest import make_mechanism

C = 0.5
EPSILONS = (0.05, 0.5, 1.0, 4.0)

#: Enough draws to see all bugs but the smallest one.
DRAWS = 640
ONE_RUN = {"canaries": 100, "guesses": 20}

Bug = Callable[[pytest.MonkeyPatch], None]

claim = partial(make_mechanism, clipping_norm=C)


def audit(mechanism: GaussianMechanism, draws: int = DRAWS) -> MechanismAudit:
    return mechanism_audit(mechanism, ReleaseNorms.of(C, 0.4, 0.3), MechanismAuditSettings(draws=draws, **ONE_RUN))


# Bugs of the sums


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clipped_sum, "clip_scales", lambda norms, _: torch.ones_like(norms))


def clipping_to_twice_the_norm(patch: pytest.MonkeyPatch) -> None:
    ours = clipped_sum.clip_scales
    patch.setattr(clipped_sum, "clip_scales", lambda norms, norm: ours(norms, 2 * norm))


def clipping_before_the_centre_is_subtracted(patch: pytest.MonkeyPatch) -> None:
    ours = ClippedSum.add

    def add(
        self: ClippedSum,
        gradients: HeadGradients,
        norm: Tensor,
        mechanism: GaussianMechanism | None,
        counted: Tensor,
        off_centre: bool = True,
    ) -> ClippedSum:
        if gradients.centre is None:
            return ours(self, gradients, norm, mechanism, counted, off_centre)
        scales = HeadGradients(gradients.residual, gradients.hidden).clip_scales(norm)
        self.add_part(gradients.select(counted).weighted_sum(scales[counted]))
        return self

    patch.setattr(ClippedSum, "add", add)


def part_norms_that_add_to_twice_the_square(patch: pytest.MonkeyPatch) -> None:
    ours = ReleaseNorms.of
    patch.setattr(ReleaseNorms, "of", lambda norm, *shares: ours(2**0.5 * norm, *shares))


def a_probe_on_top_of_a_gradient_at_c(patch: pytest.MonkeyPatch) -> None:
    ours = ReleaseNorms.of
    patch.setattr(ReleaseNorms, "of", lambda norm, *shares: ours(norm, *shares)._replace(gradient=norm))


def token_sums_on_top_of_the_other_parts(patch: pytest.MonkeyPatch) -> None:
    ours = ReleaseNorms.of
    patch.setattr(
        ReleaseNorms,
        "of",
        lambda norm, probe, token: ours(norm, probe)._replace(token_sum=ours(norm, probe, token).token_sum),
    )


def token_sums_that_are_not_clipped(patch: pytest.MonkeyPatch) -> None:
    ours = RecordSums.add

    def add(
        self: RecordSums, vectors: RecordVectors, norms: ReleaseNorms, mechanism: GaussianMechanism | None
    ) -> RecordSums:
        assert vectors.tokens is not None
        ours(self, vectors._replace(tokens=None), norms, mechanism)
        whole = HeadGradients(
            torch.ones_like(vectors.tokens[:, :1, None]), norms.token_sum * vectors.tokens[:, None]
        )
        counted = vectors.present & vectors.tokens.isfinite().all(dim=1)
        self.token_sum.add(whole, float("inf"), None, counted)
        return self

    patch.setattr(RecordSums, "add", add)


def the_whole_norm_for_each_class_of_a_unit(patch: pytest.MonkeyPatch) -> None:
    ours = RecordSums.add

    def add(
        self: RecordSums, vectors: RecordVectors, norms: ReleaseNorms, mechanism: GaussianMechanism | None
    ) -> RecordSums:
        assert vectors.units is not None
        units = vectors.units._replace(share=torch.ones_like(vectors.units.share))
        return ours(self, vectors._replace(units=units), norms, mechanism)

    patch.setattr(RecordSums, "add", add)


def records_that_are_not_finite_are_counted(patch: pytest.MonkeyPatch) -> None:
    ours = RecordSums.add
    patch.setattr(
        RecordSums,
        "add",
        lambda self, vectors, norms, _: ours(self, vectors, norms, None),
    )


def rows_without_a_record_are_counted(patch: pytest.MonkeyPatch) -> None:
    ours = RecordSums.add
    patch.setattr(
        RecordSums,
        "add",
        lambda self, vectors, norms, mechanism: ours(
            self, vectors._replace(present=torch.ones_like(vectors.present)), norms, mechanism
        ),
    )


# Bugs of the noise


def no_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target_gradient, "_noisy", lambda sums, _: sums)


def no_noise_on_the_second_moment(patch: pytest.MonkeyPatch) -> None:
    ours = target_gradient._noisy  # pyright: ignore[reportPrivateUsage]
    patch.setattr(target_gradient, "_noisy", lambda sums, mechanism: sums if -1 in sums else ours(sums, mechanism))


def no_noise_on_the_token_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TargetSums,
        "release",
        lambda self, mechanism, ours=TargetSums.release: ours(self, mechanism)._replace(tokens=self.clean.tokens),
    )


def no_noise_on_the_class_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TargetSums,
        "release",
        lambda self, noise, ours=TargetSums.release: ours(self, noise)._replace(moments=self.clean.moments),
    )


def scaled_noise(factor: float) -> Bug:
    def plant(patch: pytest.MonkeyPatch) -> None:
        ours = GaussianMechanism.noise
        patch.setattr(GaussianMechanism, "noise", lambda self, shape: factor * ours(self, shape))

    return plant


def sensitivity_of_one_record_if_records_are_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GaussianMechanism, "sensitivity", property(lambda self: self.record_norm))


def sigma_of_ten_times_the_delta(patch: pytest.MonkeyPatch) -> None:
    ours = GaussianMechanism.sigma.fget  # pyright: ignore[reportFunctionMemberAccess]
    assert ours is not None
    patch.setattr(
        GaussianMechanism,
        "sigma",
        property(lambda self: ours(self.model_copy(update={"delta": 10 * self.delta}))),
    )


def one_seed_for_every_draw(patch: pytest.MonkeyPatch) -> None:
    seeded = np.random.default_rng
    patch.setattr(mechanism_module, "system_standard_normal", lambda shape: seeded(0).normal(size=shape))


def one_noise_for_all_classes(patch: pytest.MonkeyPatch) -> None:
    def noisy(sums: dict[int, Tensor], mechanism: GaussianMechanism) -> dict[int, Tensor]:
        noise = torch.from_numpy(mechanism.noise(tuple(next(iter(sums.values())).shape)))
        return {label: value + noise for label, value in sums.items()}

    patch.setattr(target_gradient, "_noisy", noisy)


def noise_of_the_release_before(patch: pytest.MonkeyPatch) -> None:
    """Every second draw of a shape is the one before again."""
    ours, calls, drawn = mechanism_module.system_standard_normal, itertools.count(), {}

    def pooled(shape: tuple[int, ...]) -> np.ndarray:
        if next(calls) // 4 % 2 == 0 or shape not in drawn:  # a release draws four times
            drawn[shape] = ours(shape)
        return drawn[shape]

    patch.setattr(mechanism_module, "system_standard_normal", pooled)


SUMS, NOISE, CORRELATION = {"sensitivity"}, {"noise"}, {"correlation"}

#: Each bug, in the words of the table, and the checks that find it.
BUGS: dict[str, tuple[Bug, set[str]]] = {
    "no clipping": (no_clipping, SUMS),
    "clipping to 2 C": (clipping_to_twice_the_norm, SUMS),
    "clipping before the centre is subtracted": (clipping_before_the_centre_is_subtracted, SUMS),
    "part norms whose squares add up to 2 C^2": (part_norms_that_add_to_twice_the_square, SUMS),
    "a probe on top of a gradient clipped to C": (a_probe_on_top_of_a_gradient_at_c, SUMS),
    "token sums on top of parts that add up to C^2": (token_sums_on_top_of_the_other_parts, SUMS),
    "token sums that are not clipped": (token_sums_that_are_not_clipped, SUMS),
    "the whole norm for each class of a unit": (the_whole_norm_for_each_class_of_a_unit, SUMS),
    "vectors that are not finite are counted": (records_that_are_not_finite_are_counted, SUMS),
    "rows without a record are counted": (rows_without_a_record_are_counted, SUMS),
    "no noise": (no_noise, NOISE),
    "no noise on the second moment": (no_noise_on_the_second_moment, NOISE),
    "no noise on the token sums": (no_noise_on_the_token_sums, NOISE),
    "noise divided by sqrt 2": (scaled_noise(0.5**0.5), NOISE),
    "noise for a mean of 100 records": (scaled_noise(0.01), NOISE),
    "noise multiplied by sqrt 2": (scaled_noise(2**0.5), NOISE),
    "sigma for 10 delta": (sigma_of_ten_times_the_delta, NOISE),
    "one seed for every draw": (one_seed_for_every_draw, CORRELATION),
    "one noise for all classes": (one_noise_for_all_classes, CORRELATION),
    "every second release repeats the noise of the one before": (noise_of_the_release_before, CORRELATION),
}


def cases() -> Iterator[Any]:
    """Each bug at each epsilon: bugs of the noise at the smallest and the largest, all others at the largest.

    Sums do not depend on epsilon. The nightly tests run all cases.
    """
    for (name, (_, expected)), epsilon in itertools.product(BUGS.items(), EPSILONS):
        chosen = EPSILONS[-1:] if expected == SUMS else (EPSILONS[0], EPSILONS[-1])
        yield pytest.param(name, epsilon, marks=() if epsilon in chosen else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "epsilon"), list(cases()))
def test_the_audit_finds_every_planted_bug(name: str, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, expected = BUGS[name]
    mechanism = claim(epsilon)
    plant(monkeypatch)
    found = audit(mechanism)
    assert not found.passes
    assert expected <= {check.test for check in found.checks if not check.passes}


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_audit_finds_a_sensitivity_of_c_if_records_are_replaced(
    epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = claim(epsilon, adjacency="replace")
    assert audit(mechanism).passes
    sensitivity_of_one_record_if_records_are_replaced(monkeypatch)
    assert not audit(mechanism).check("noise").passes


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_audit_finds_class_sums_without_noise_where_no_second_moment_is_released(
    epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism, norms = claim(epsilon), ReleaseNorms.of(C, 0.4, 0.3, class_sum_share=1.0)
    settings = MechanismAuditSettings(draws=DRAWS, **ONE_RUN)
    assert norms.second_moment == 0
    assert mechanism_audit(mechanism, norms, settings).passes
    no_noise_on_the_class_sums(monkeypatch)
    assert not mechanism_audit(mechanism, norms, settings).check("noise").passes


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_no_bug_is_found_where_none_is(epsilon: float) -> None:
    assert audit(claim(epsilon)).failed == []


def test_the_documentation_has_these_bugs_and_the_checks_that_find_them() -> None:
    text = (Path(__file__).parents[3] / "docs/privacy/audits.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    told = {row[0]: set(row[1].split(", ")) for row in rows if row[0] in BUGS}
    assert told == {name: checks for name, (_, checks) in BUGS.items()}
