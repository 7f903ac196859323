from __future__ import annotations

import numpy as np
import pytest
import torch

from deployments.recipe_files import find_recipe
from gradmm_core.preflight import EXPECTED_SHIFT, expected_cosines, preflight_lines, released_target
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.recipe import load_recipe
from gradmm_core.release_norms import MOST_DIMENSIONS, ReleaseNorms

MECHANISM = GaussianMechanism(
    epsilon=0.5, delta=1e-5, clipping_norm=1.0, adjacency="add-or-remove", calibration="analytic"
)
NORMS = ReleaseNorms.of(1.0, probe_share=0.0)


def space(coordinates: int, **labels: float) -> dict:
    """Figures of a space; a label's value is the norm of its unclipped mean."""
    return {
        "coordinates": coordinates,
        "unclipped": {label.strip("_"): norm for label, norm in labels.items()},
        "plain": {label.strip("_"): 0.9 for label in labels},
        "clip_scale": {label.strip("_"): 0.2 for label in labels},
    }


def test_the_expected_cosine_is_what_a_signal_of_that_size_has_on_average() -> None:
    (expected,) = expected_cosines(MECHANISM, NORMS, space(400, _0=8.0), records=600)
    for cosine, signal in ((expected.plain, 600 * 0.9), (expected.centred, 600 * EXPECTED_SHIFT * 8.0 * 0.2)):
        clean = np.zeros(400)
        clean[0] = signal
        noisy = clean + np.random.default_rng(0).normal(scale=MECHANISM.sigma, size=(200, 400))
        drawn = torch.nn.functional.cosine_similarity(torch.from_numpy(noisy), torch.from_numpy(clean)[None])
        assert cosine == pytest.approx(float(drawn.mean()), abs=0.01)


def test_records_are_shared_out_among_the_classes_and_none_adds_more_than_c() -> None:
    first, second = expected_cosines(MECHANISM, NORMS, space(400, _0=8.0, _1=1e6), records=1200)
    (alone,) = expected_cosines(MECHANISM, NORMS, space(400, _0=8.0), records=600)
    assert first.centred == alone.centred
    assert second.centred == pytest.approx(600 / np.hypot(600, MECHANISM.sigma * 20))


def test_a_probe_leaves_a_record_its_part_of_c() -> None:
    whole, part = (
        expected_cosines(MECHANISM, ReleaseNorms.of(1.0, share), space(400, _0=1e6), records=600)[0].centred
        for share in (0.0, 0.75)
    )
    signal = 600 * 0.5  # where every record is clipped, sqrt(1 - 0.75) of it is left
    assert part == pytest.approx(signal / np.hypot(signal, MECHANISM.sigma * 20))
    assert part < whole


def test_a_target_of_noise_is_warned_of() -> None:
    weak = expected_cosines(MECHANISM, NORMS, space(4_000_000, _0=8.0), records=600)
    strong = expected_cosines(MECHANISM, NORMS, space(4, _0=8.0), records=60_000)
    assert [line.startswith("WARNING") for line in preflight_lines(weak, {0: "bad"})] == [False, True]
    (line,) = preflight_lines(strong, {0: "bad"})
    assert line == "expected cosine of noisy and clean target, bad: 1.00, centred 1.00"


@pytest.mark.parametrize(
    ("overrides", "share", "dimensions"),
    [
        ([], 0.5, MOST_DIMENSIONS),
        (["privacy.epsilon=0.05", "privacy.declared_records=67349"], 0.5, 33),
        (["privacy.epsilon=0.05", "privacy.declared_records=8000"], 0.0, "auto"),
        (["privacy.epsilon=1", "privacy.declared_records=8000"], 0.5, 50),
        (
            ["privacy.epsilon=0.05", "privacy.declared_records=8000", "target_gradient.probe_dimensions=4"],
            0.5,
            4,
        ),
        (["privacy.epsilon=1", "privacy.declared_records=8000", "target_gradient.probe_share=0"], 0.0, "auto"),
    ],
)
def test_a_probe_is_released_where_the_noise_leaves_it_enough_to_learn(
    overrides: list[str], share: float, dimensions: int | str
) -> None:
    recipe = load_recipe(find_recipe("sst2"), ["privacy.delta=1e-5", *overrides])
    released = released_target(recipe)
    assert (released.probe_share, released.probe_dimensions) == (share, dimensions)
    changed = {"probe_share": share, "probe_dimensions": dimensions}
    assert released == recipe.target_gradient.model_copy(update=changed)
