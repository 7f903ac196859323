"""The plots: drawn values, read back from the figures, and self-contained SVG."""

from __future__ import annotations

import io
import math
import re
import threading
import xml.etree.ElementTree as ET
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from gradmm.audits.mia_audit import largest_advantage
from gradmm.config.settings import PrivacySettings
from gradmm.outputs import plot_style, plots
from gradmm.privacy.guarantee import guarantee
from gradmm.privacy.mechanism import gaussian_mechanism
from gradmm.studies import plots as study_plots
from tests.unit.outputs.test_report import audit_rows, finetune_rows

FINETUNE = {
    "accuracy_before": 0.60311,
    "learning_rate_synthetic": 1e-4,
    "steps_synthetic": 200,
    "learning_rate_real": 3e-5,
    "steps_real": 200,
}
AUDIT = {"test_records": 100, "advantage": 0.03, "detectable_advantage": 0.1763, "auc": 0.51, "tpr_at_1_fpr": 0.02}


def compare_rows() -> pd.DataFrame:
    """Return rows of the stage `compare`: an arm with its own size, and figures of one seed."""
    rows = [
        ("before", 0, 0.6, None),
        ("random", 10, 0.7, 0.02),
        ("random", 50, 0.75, 0.01),
        ("gradmm", 10, 0.71, None),
        ("gradmm", 50, 0.72, 0.02),
    ]
    return pd.DataFrame(rows, columns=["arm", "size", "accuracy", "accuracy_half_width"])


def gradients_rows() -> pd.DataFrame:
    """Return rows of the stage `gradients`: one seed without an interval, and a diverged arm."""
    rows = [
        ("random", 0, "head", 1.5, 0.1),
        ("random", 0, "all", 1.4, 0.1),
        ("random", 50, "head", 0.9, 0.2),
        ("random", 50, "all", 0.8, 0.2),
        ("gradmm", 0, "head", 1.2, None),
        ("gradmm", 0, "all", 1.1, None),
        ("gradmm", 50, "head", None, None),
        ("gradmm", 50, "all", None, None),
    ]
    return pd.DataFrame(rows, columns=["arm", "step", "part", "error", "error_half_width"])


def bounds_rows() -> pd.DataFrame:
    """Return rows of the stage `bounds` with a diverged arm."""
    rows = [
        ("random", 50, 3, 0.5, 0.9, 0.01, 0.05, 3, 3),
        ("gradmm", 50, 3, 0.4, 0.3, 0.02, 0.04, 1, 3),
        ("zero-shot", 50, 3, None, None, None, None, 0, 0),
    ]
    measures = ["gap", "sharp_gap_bound", "loss_difference", "sharp_loss_bound"]
    return pd.DataFrame(rows, columns=["arm", "step", "runs", *measures, "sharp_gap_held", "sharp_loss_held"])


def figures() -> dict[str, Figure]:
    """Draw one figure of each kind."""
    return {
        "loss_history": plots.loss_history(pd.DataFrame({"loss_history": [[0.5, 0.2], [0.4, 0.3]]})),
        "survivors": plots.survivors(["bad", "good"], ["generation", "label_filter"], [[4, 4], [2, 3]]),
        "accuracy": plots.accuracy_by_step(finetune_rows(), FINETUNE),
        "roc": plots.roc(audit_rows(), AUDIT, epsilon=0.5, delta=1e-5),
        "accuracy_by_size": study_plots.accuracy_by_size(compare_rows()),
        "gradient_errors": study_plots.gradient_errors(gradients_rows()),
        "bounds": study_plots.bounds_and_observations(bounds_rows()),
        "cosines": plots.cosines({"bad": 0.8}, {"bad": 0.75, "good": 0.9}),
    }


@pytest.fixture(scope="module")
def svgs() -> dict[str, str]:
    """All figures as SVG, drawn once."""
    return {name: plot_style.svg(figure) for name, figure in figures().items()}


def lines(figure: Figure) -> dict[str, Any]:
    """Return a figure's lines by their label."""
    return {str(line.get_label()): line for line in figure.axes[0].get_lines()}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_loss_history_is_the_median_and_the_quartiles_of_each_round() -> None:
    history = [[0.5, 0.4, 0.1], [0.6, 0.3, 0.2], [0.7, 0.2], [0.8, math.nan, math.inf], [0.9, 0.1, 0.3]]
    figure = plots.loss_history(pd.DataFrame({"loss_history": history}))
    median = lines(figure)["median"]
    assert median.get_xdata().tolist() == [0, 1, 2]
    assert median.get_ydata() == pytest.approx([0.7, 0.25, 0.2])
    (band,) = figure.axes[0].collections
    corners = np.asarray(band.get_paths()[0].vertices)
    for round_, low, high in ((0, 0.6, 0.8), (1, 0.175, 0.325), (2, 0.15, 0.25)):
        heights = corners[corners[:, 0] == round_, 1]
        assert (heights.min(), heights.max()) == pytest.approx((low, high))
    assert figure.axes[0].get_ylim()[0] == 0
    assert "Median over 5 texts: 0.7 at the start, 0.2 after 2 rounds" in str(figure.get_label())


def test_loss_history_reads_what_parquet_gives_and_refuses_what_has_no_number() -> None:
    arrays = pd.DataFrame({"loss_history": [np.array([0.5, 0.4]), np.array([0.3, 0.2])]})
    assert lines(plots.loss_history(arrays))["median"].get_ydata() == pytest.approx([0.4, 0.3])
    single = plots.loss_history(pd.DataFrame({"loss_history": [[0.5]]}))
    assert lines(single)["median"].get_marker() == "o"  # a line of one point is invisible
    with pytest.raises(ValueError, match="no text has a finite loss"):
        plots.loss_history(pd.DataFrame({"loss_history": [[math.nan]]}))


def test_survivors_are_bars_of_each_class_side_by_side() -> None:
    counts = [[60, 60], [32, 60], [0, 25]]
    figure = plots.survivors(["negative", "positive"], ["generation", "label_filter", "loss_selection"], counts)
    bars: list[Any] = list(figure.axes[0].patches)
    assert [bar.get_width() for bar in bars] == [60, 32, 0, 60, 60, 25]
    assert [bar.get_x() for bar in bars] == [0, 0, 0, 60, 32, 0]
    assert [text.get_text() for text in figure.axes[0].texts] == ["120", "92", "25"]
    assert legend(figure) == ["negative", "positive"]
    assert "after label filter 32 negative, 60 positive" in str(figure.get_label())


def test_accuracy_is_that_on_test_with_the_chosen_schedule() -> None:
    figure = plots.accuracy_by_step(finetune_rows(), FINETUNE)
    drawn = lines(figure)
    assert drawn["synthetic"].get_xdata().tolist() == [50, 100, 150, 200]
    assert drawn["synthetic"].get_ydata() == pytest.approx([0.645, 0.67, 0.695, 0.72])
    assert drawn["real"].get_ydata()[-1] == pytest.approx(0.74)
    assert set(drawn["before fine-tuning"].get_ydata()) == {0.60311}
    dots = [line for line in figure.axes[0].get_lines() if line.get_linestyle() == "None"]
    assert [np.size(line.get_xdata()) for line in dots] == [12, 12]
    assert legend(figure) == ["synthetic", "real", "before fine-tuning"]
    for figure in ("learning_rate_real", "steps_real"):
        with pytest.raises(KeyError, match=figure):
            plots.accuracy_by_step(finetune_rows(), {k: v for k, v in FINETUNE.items() if k != figure})


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_equal_accuracies_have_an_axis_that_does_not_make_much_of_them(level: float) -> None:
    figure = plots.accuracy_by_step(finetune_rows().assign(accuracy=level), FINETUNE | {"accuracy_before": level})
    low, high = figure.axes[0].get_ylim()
    assert high - low >= 0.04
    assert low < level < high


def test_roc_is_the_splits_mean_in_the_exact_interval_of_one() -> None:
    rows = audit_rows(2)
    rows["roc"] = [[0.0] * 100 + [1.0], [0.04] * 100 + [1.0]]
    figure = plots.roc(rows, AUDIT, epsilon=0.5, delta=1e-5)
    drawn = lines(figure)
    attack = drawn["the attack"]
    assert (len(attack.get_xdata()), attack.get_ydata()[0], attack.get_ydata()[-1]) == (101, 0.02, 1.0)
    bound = drawn["bound of the guarantee"]
    gap = bound.get_ydata() - bound.get_xdata()
    assert gap.max() == pytest.approx(largest_advantage(0.5, 1e-5), abs=2e-3)
    assert gap.max() <= largest_advantage(0.5, 1e-5)
    (band,) = [c for c in figure.axes[0].collections if c.get_label() == "95% interval of one split"]
    at_zero = {y for x, y in np.asarray(band.get_paths()[0].vertices) if x == 0}
    # Clopper and Pearson's interval for 2 of 100.
    assert (min(at_zero), max(at_zero)) == pytest.approx((0.00243, 0.07038), abs=1e-5)


def test_roc_without_a_claim_or_with_too_few_records_leaves_out_what_there_is_not() -> None:
    figure = plots.roc(audit_rows(), AUDIT | {"detectable_advantage": None, "test_records": 2, "advantage": -1.0})
    assert set(legend(figure)) == {"guessing", "the attack", "95% interval of one split"}


def test_the_trade_off_is_a_curve_from_all_missed_to_all_false_alarms() -> None:
    settings = PrivacySettings(epsilon=1.0, delta=1e-5)
    found = guarantee(settings, gaussian_mechanism(settings))
    figure = plots.trade_off(found)
    assert figure.get_label() == found.in_words
    guessing, curve = figure.axes[0].get_lines()
    false_alarms, missed = np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())
    assert (missed[0], missed[-1]) == (1.0, 0.0)
    assert (np.diff(missed) < 0).all()
    assert (missed <= np.asarray(guessing.get_ydata())).all()
    # The Gaussian trade-off is symmetric.
    np.testing.assert_allclose(np.interp(missed[::-1], false_alarms, missed), false_alarms[::-1], atol=0.003)


def test_cosines_that_were_not_expected_are_drawn_alone() -> None:
    figure = plots.cosines({"bad": 0.8}, {"bad": 0.75, "good": -0.1})
    drawn = lines(figure)
    assert drawn["actual"].get_xdata().tolist() == [0.75, -0.1]
    assert drawn["expected"].get_xdata()[0] == 0.8
    assert math.isnan(drawn["expected"].get_xdata()[1])
    assert figure.axes[0].get_xlim()[0] < -0.1
    assert legend(plots.cosines({}, {"bad": 0.75})) == ["actual"]


def test_svg_is_the_same_each_time_and_after_a_png(svgs: dict[str, str]) -> None:
    for name, figure in figures().items():
        assert plot_style.svg(figure) == svgs[name], name
        plot_style.png(figure)
        assert plot_style.svg(figure) == svgs[name], name


def test_svg_takes_on_the_ink_of_its_page_and_refers_to_nothing_else(svgs: dict[str, str]) -> None:
    for name, figure in figures().items():
        text = svgs[name]
        root = ET.fromstring(text)
        assert root.get("role") == "img"
        assert str(root.get("aria-label")).startswith(figure.axes[0].get_title(loc="left"))
        assert str(figure.get_label()) in str(root.get("aria-label"))
        assert root.get("width") is None
        words = list(root.iter("{http://www.w3.org/2000/svg}text"))
        assert len(words) > 5
        assert {word.get("fill") for word in words} == {"currentColor"}
        assert {word.get("font-family") for word in words} == {"sans-serif"}
        assert plot_style.INK not in text
        assert not re.search(r"style=|<style|url\(|xlink|ns\d:|#000000|<metadata|<\?xml|<!DOCTYPE", text)
        identifiers = [element.get("id") for element in root.iter() if "id" in element.attrib]
        assert {element.get("href") for element in root.iter() if "href" in element.attrib} == {
            f"#{name}" for name in identifiers
        }


def test_plots_on_one_page_have_names_of_their_own(svgs: dict[str, str]) -> None:
    names = re.findall(r' id="([^"]+)"', "".join(svgs.values()))
    assert names
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["$x^2$", "_hidden", '"<script>&', "a\x07b\ufffe", "中文", "x" * 200])
def test_any_name_of_a_class_is_shown_as_text(name: str) -> None:
    figure = plots.survivors([name, "other"], ["generation"], [[3, 4]])
    shown = [e.text or "" for e in ET.fromstring(plot_style.svg(figure)).iter("{http://www.w3.org/2000/svg}text")]
    expected = name.replace("\x07", "\ufffd").replace("\ufffe", "\ufffd")[:20]
    assert any(expected in text for text in shown)
    assert plot_style.svg(plots.cosines({}, {name: 0.5}))
    assert plot_style.png(figure)


def test_png_is_opaque_and_as_wide_as_a_page() -> None:
    for name, figure in figures().items():
        content = plot_style.png(figure)
        assert plot_style.png(figure) == content
        image = Image.open(io.BytesIO(content))
        assert abs(image.width - 900) <= 1
        pixels = np.asarray(image.convert("RGBA"))
        assert (pixels[..., 3] == 255).all()
        assert (pixels[0, 0, :3] == 255).all()
        drawn = (pixels[..., :3] != 255).any(axis=2)
        assert drawn.mean() > 0.005, name
        assert not drawn[:, 0].any()  # nothing runs off the sides
        assert not drawn[:, -1].any()


def test_colours_can_be_seen_on_white_and_on_the_dark_page() -> None:
    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    def contrast(one: str, other: str) -> float:
        low, high = sorted([luminance(one), luminance(other)])
        return (high + 0.05) / (low + 0.05)

    for page in ("#ffffff", "#14181c"):
        for colour in plot_style.COLOURS:
            assert contrast(colour, page) >= 3, (colour, page)
    assert contrast(plot_style.INK_ON_ANY, "#ffffff") >= 4.5
    assert contrast(plot_style.INK_ON_ANY, "#000000") >= 4.5


def test_looks_do_not_depend_on_the_users_settings_nor_change_them(svgs: dict[str, str]) -> None:
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "text.color": "red", "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert plot_style.svg(plots.accuracy_by_step(finetune_rows(), FINETUNE)) == svgs["accuracy"]
        assert dict(matplotlib.rcParams) == before


def test_threads_do_not_disturb_one_another(svgs: dict[str, str]) -> None:
    drawn: list[dict[str, str]] = []

    def draw() -> None:
        drawn.append({name: plot_style.svg(figure) for name, figure in figures().items()})

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [svgs, svgs]


def test_gradient_errors_are_a_line_for_each_arm_and_part() -> None:
    figure = study_plots.gradient_errors(gradients_rows())
    assert legend(figure) == ["random", "random, head", "gradmm", "gradmm, head"]
    error_bars: list[Any] = figure.axes[0].containers
    by_label = {each.get_label(): each.lines[0] for each in error_bars}
    assert by_label["random"].get_ydata().tolist() == [1.4, 0.8]
    assert by_label["random, head"].get_ydata().tolist() == [1.5, 0.9]
    assert by_label["gradmm"].get_color() != by_label["random"].get_color()
    assert by_label["random, head"].get_color() == by_label["random"].get_color()
    assert str(figure.get_label()) == "All parameters after 50 steps: random 0.80, gradmm diverged."


def test_bounds_are_drawn_over_observations_beside_the_diagonal() -> None:
    figure = study_plots.bounds_and_observations(bounds_rows())
    drawn = lines(figure)
    assert drawn["random: gap"].get_xydata().tolist() == [[0.5, 0.9]]
    assert drawn["gradmm: losses"].get_xydata().tolist() == [[0.02, 0.04]]
    assert drawn["equal"].get_xydata().tolist() == [[0.01, 0.01], [0.5, 0.5]]
    assert "$" not in plot_style.svg(figure)  # no tick says so in TeX
    assert str(figure.get_label()) == "10 of 18 bounds of single runs held."
