from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.loading import load_recipe
from gradmm.config.settings import PrivacySettings
from gradmm.deployments.recipe_files import find_preset, find_recipe
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.release_plan import release_plan
from gradmm.privacy.sensitivity import MAX_DIMENSIONS, ReleaseNorms
from gradmm.target.preflight import (
    EXPECTED_SHIFT,
    delta_warning,
    expected_cosines,
    parts_left_out,
    preflight_lines,
)

ROOT = Path(__file__).parents[3]

MECHANISM = GaussianMechanism(
    epsilon=0.5, delta=1e-5, clipping_norm=1.0, adjacency="add-or-remove", calibration="analytic"
)
NORMS = ReleaseNorms.of(1.0, probe_share=0.0)


def space(coordinates: int, **labels: float) -> dict:
    """Make a space's figures; a label's value is the norm of its unclipped mean."""
    return {
        "coordinates": coordinates,
        "unclipped": {label.strip("_"): norm for label, norm in labels.items()},
        "plain": {label.strip("_"): 0.9 for label in labels},
        "clip_scale": {label.strip("_"): 0.2 for label in labels},
    }


@pytest.mark.parametrize(
    ("delta", "records", "warned"),
    [
        (1e-5, 10_000, True),
        (0.99e-5, 10_000, False),
        (None, 10_000, False),
        (1e-3, None, False),
        (9e-4, 999, True),
    ],
)
def test_a_delta_from_a_tenth_of_a_record_on_is_warned_of(
    delta: float | None, records: int | None, warned: bool
) -> None:
    words = delta_warning(PrivacySettings(epsilon=1.0, delta=delta, declared_records=records))
    assert bool(words) is warned
    if records == 999:
        assert "times 999 declared records is 0.9: a guarantee with this delta would allow" in words
        assert words.endswith("Set less than 0.0001")


@given(records=st.integers(20, 10**8))
def test_the_delta_that_a_warning_asks_for_is_not_warned_of(records: int) -> None:
    words = delta_warning(PrivacySettings(epsilon=1.0, delta=1 / records, declared_records=records))
    asked = float(words.rpartition(" ")[2])
    again = PrivacySettings(epsilon=1.0, delta=0.999 * asked, declared_records=records)
    assert delta_warning(again) == ""
    assert asked > 0.085 / records


def test_the_expected_cosine_is_the_mean_cosine_of_a_signal_of_that_norm() -> None:
    (expected,) = expected_cosines(MECHANISM, NORMS, space(400, _0=8.0), records=600)
    for cosine, signal in ((expected.plain, 600 * 0.9), (expected.centred, 600 * EXPECTED_SHIFT * 8.0 * 0.2)):
        clean = np.zeros(400)
        clean[0] = signal
        noisy = clean + np.random.default_rng(0).normal(scale=MECHANISM.sigma, size=(200, 400))
        drawn = torch.nn.functional.cosine_similarity(torch.from_numpy(noisy), torch.from_numpy(clean)[None])
        assert cosine == pytest.approx(float(drawn.mean()), abs=0.01)


def test_records_are_divided_among_the_classes_and_each_adds_at_most_c() -> None:
    first, second = expected_cosines(MECHANISM, NORMS, space(400, _0=8.0, _1=1e6), records=1200)
    (alone,) = expected_cosines(MECHANISM, NORMS, space(400, _0=8.0), records=600)
    assert first.centred == alone.centred
    assert second.centred == pytest.approx(600 / np.hypot(600, MECHANISM.sigma * 20))


def test_with_a_probe_the_gradient_has_its_share_of_c() -> None:
    whole, part = (
        expected_cosines(MECHANISM, ReleaseNorms.of(1.0, share), space(400, _0=1e6), records=600)[0].centred
        for share in (0.0, 0.75)
    )
    signal = 600 * 0.5  # every record is clipped to sqrt(1 - 0.75) of C
    assert part == pytest.approx(signal / np.hypot(signal, MECHANISM.sigma * 20))
    assert part < whole


def test_a_target_that_is_mostly_noise_is_warned_about() -> None:
    weak = expected_cosines(MECHANISM, NORMS, space(4_000_000, _0=8.0), records=600)
    strong = expected_cosines(MECHANISM, NORMS, space(4, _0=8.0), records=60_000)
    assert [line.startswith("WARNING") for line in preflight_lines(weak, {0: "bad"})] == [False, True]
    (line,) = preflight_lines(strong, {0: "bad"})
    assert line == "expected cosine of noisy and clean target, bad: 1.00, centred 1.00"


@pytest.mark.parametrize(
    ("overrides", "share", "dimensions"),
    [
        ([], 0.5, MAX_DIMENSIONS),
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
    recipe = load_recipe(find_recipe("sst2"), ["privacy.delta=1e-5", *overrides], find_preset("search"))
    released = release_plan(recipe).target
    assert (released.probe_share, released.probe_dimensions) == (share, dimensions)
    assert recipe.target_gradient.probe_covariance == "records"  # of the preset
    changed = {"probe_share": share, "probe_dimensions": dimensions}
    assert released == recipe.target_gradient.model_copy(update=changed)


@pytest.mark.parametrize(
    ("epsilon", "records", "parts", "suggested"),
    [
        (1.0, 3000, [], None),
        (1.0, 1800, ["second moment"], 2.0),
        (1.0, 1600, ["token rates"], 2.0),
        (0.05, 3000, ["second moment", "token rates"], 1.0),
        (4.0, 100, ["second moment", "token rates"], None),
        (0.05, 300, ["probe", "token rates"], None),
    ],
)
def test_what_the_noise_would_drown_is_said_with_an_epsilon_that_is_enough(
    epsilon: float, records: int, parts: list[str], suggested: float | None
) -> None:
    overrides = [f"privacy.epsilon={epsilon}", f"privacy.declared_records={records}"]
    recipe = load_recipe(find_recipe("rotten_tomatoes"), overrides)
    lines = parts_left_out(recipe, release_plan(recipe))
    assert [line.partition(":")[0] for line in lines] == [
        "no second moment, so the probe labels texts but chooses none" if part == "second moment" else f"no {part}"
        for part in parts
    ]
    for line in lines:
        assert line.endswith("more records" if suggested is None else f"or privacy.epsilon={suggested:g}")
    if suggested is not None:
        enough = load_recipe(find_recipe("rotten_tomatoes"), [f"privacy.epsilon={suggested}", *overrides[1:]])
        assert parts_left_out(enough, release_plan(enough)) == []
    assert parts_left_out(recipe, release_plan(load_recipe(find_recipe("rotten_tomatoes")))) == []


def test_the_guide_has_the_numbers_of_records_that_token_rates_need() -> None:
    table = re.findall(r"^  \| ([\w ]+) \| (.*) \|$", (ROOT / "docs/guide/recipes.md").read_text(), re.MULTILINE)
    rows = {name: [cell.strip() for cell in cells.split("|")] for name, cells in table}
    for name, recipe in (("two classes", "rotten_tomatoes"), ("six classes", "tweet_emotions_six")):
        for epsilon, written in zip(rows["epsilon"], rows[name], strict=True):
            number = int(written.replace(",", ""))
            for records, fits in ((1.02 * number, True), (0.98 * number, False)):
                asked = [f"privacy.epsilon={epsilon}", f"privacy.declared_records={round(records)}"]
                plan = release_plan(load_recipe(find_recipe(recipe), asked))
                assert (plan.target.token_share > 0) == fits


def test_the_guide_has_the_numbers_of_records_that_class_sums_need() -> None:
    guide = (ROOT / "docs/guide/recipes.md").read_text()
    found = re.search(r"class sums alone ([\d,]+) under epsilon ([\d.]+) and (\d+) under (\d)", guide)
    assert found is not None
    *_, records, epsilon = found.groups()
    for number, at in ((found[1].replace(",", ""), found[2]), (records, epsilon)):
        for offset, probe in ((0, True), (-1, False)):
            asked = [f"privacy.epsilon={at}", f"privacy.declared_records={int(number) + offset}"]
            plan = release_plan(load_recipe(find_recipe("rotten_tomatoes"), asked))
            assert (plan.target.probe_share > 0) == probe
