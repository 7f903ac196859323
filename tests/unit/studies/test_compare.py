"""The table of a comparison compared with a slow oracle, and its Markdown with the table."""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from gradmm.config.loading import load_recipe
from gradmm.config.settings import PrivacySettings
from gradmm.deployments.recipe_files import find_recipe
from gradmm.evaluation.finetune_eval import COLUMNS
from gradmm.metrics.intervals import interval_over_rows
from gradmm.outputs.record import StageRecord, library_versions
from gradmm.privacy.guarantee import guarantee
from gradmm.privacy.mechanism import gaussian_mechanism
from gradmm.privacy.release_plan import release_plan
from gradmm.storage.artifacts import Root
from gradmm.studies import plots as study_plots
from gradmm.studies.compare import MEASURES, MIN_GAP, compare_arms, with_gap_recovered
from gradmm.studies.pages import comparison_tables, study_page, study_pictures
from gradmm.studies.record import StudyRecord, source_commit, write_study

ARM_SIZES = {"before": [0], "zero-shot": [5, 10], "real-1k": [1000], "gradmm": [5, 10]}
RATES, TOTALS, SEEDS = (1e-4, 1e-3), (10, 20), (0, 1, 2, 3)


def evaluations(seeds: tuple[int, ...] = SEEDS, arm_sizes: dict[str, list[int]] = ARM_SIZES) -> pd.DataFrame:
    """Rows with all schedules for the first seed, and the best one on validation for the others."""
    random, rows = np.random.default_rng(0), []

    def measured(arm: str, size: int, seed: int, rate: float, steps: int, step: int) -> float:
        accuracies = random.integers(100, 180, 2) / 200
        for split, accuracy in zip(("validation", "test"), accuracies, strict=True):
            correct = random.permutation(200) < round(200 * accuracy) if split == "test" else None
            of_run = [arm, seed, rate, steps, step, split, accuracy, 1.0 - accuracy]
            rows.append([*of_run, correct, size, min(size, 900)])
        return accuracies[0]

    for arm, sizes in arm_sizes.items():
        for size in sizes:
            if arm == "before":
                measured(arm, size, seeds[0], 0.0, 0, 0)
                continue
            grid = [(rate, steps, step) for rate in RATES for steps in TOTALS for step in (5, steps)]
            found = {point: measured(arm, size, seeds[0], *point) for point in grid}
            rate, steps, _ = max(found, key=found.__getitem__)
            for seed in seeds[1:]:
                for step in (5, steps):
                    measured(arm, size, seed, rate, steps, step)
    return pd.DataFrame(rows, columns=[*COLUMNS, "size", "texts"])


def measures() -> pd.DataFrame:
    random = np.random.default_rng(1)
    rows = [
        {"arm": arm, "size": size, "seed": seed, "texts": size} | {m: random.uniform() for m in MEASURES}
        for arm, sizes in ARM_SIZES.items()
        for size in sizes
        for seed in SEEDS
        if size
    ]
    return pd.DataFrame(rows)


def chosen(rows: pd.DataFrame, arm: str, size: int, split: str = "validation") -> dict[int, dict[str, Any]]:
    """Test row by seed of the checkpoint that is best on `split`, with the best schedule on validation."""
    of_arm = [row for row in rows.to_dict("records") if (row["arm"], row["size"]) == (arm, size)]
    validation = [row for row in of_arm if row["split"] == "validation"]
    best = max(validation, key=lambda row: row["accuracy"])
    schedule = best["learning_rate"], best["steps"]
    found = {}
    for seed in {row["seed"] for row in of_arm}:
        run = [row for row in of_arm if (row["seed"], row["learning_rate"], row["steps"]) == (seed, *schedule)]
        step = max((row for row in run if row["split"] == split), key=lambda row: row["accuracy"])["step"]
        (found[seed],) = (row for row in run if row["split"] == "test" and row["step"] == step)
    return dict(sorted(found.items()))


def honest(rows: pd.DataFrame, arm: str, size: int, split: str = "validation") -> dict[int, float]:
    """Test accuracy by seed of `chosen`."""
    return {seed: row["accuracy"] for seed, row in chosen(rows, arm, size, split).items()}


def half_width(values: list[float]) -> float:
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return with_gap_recovered(compare_arms(evaluations(), measures()))


def test_rows_are_means_over_seeds_of_both_checkpoints(table: pd.DataFrame) -> None:
    rows = evaluations()
    assert [*zip(table["arm"], table["size"], strict=True)] == [
        (arm, size) for arm, sizes in ARM_SIZES.items() for size in sizes
    ]
    for row in table.to_dict("records"):
        picked = [*honest(rows, row["arm"], row["size"]).values()]
        best = [*honest(rows, row["arm"], row["size"], "test").values()]
        assert row["accuracy"] == pytest.approx(statistics.fmean(picked))
        assert row["best_on_test"] == pytest.approx(statistics.fmean(best))
        assert row["best_on_test"] >= row["accuracy"]
        assert row["seeds"] == len(picked) == (1 if row["arm"] == "before" else 4)
        assert row["texts"] == min(row["size"], 900)
        if row["arm"] != "before":
            assert row["accuracy_half_width"] == pytest.approx(half_width(picked))
            assert row["best_on_test_half_width"] == pytest.approx(half_width(best))
            of_arm = measures().query("arm == @row['arm'] and size == @row['size']")
            assert all(row[m] == pytest.approx(of_arm[m].mean()) for m in MEASURES)
        else:
            assert math.isnan(row["accuracy_half_width"])


def test_differences_are_the_products_lead_paired_by_seed(table: pd.DataFrame) -> None:
    rows = evaluations()
    for row in table.to_dict("records"):
        if row["arm"] == "gradmm":
            assert pd.isna(row["verdict"])
            continue
        assert row["against_size"] == (row["size"] if row["size"] in (5, 10) else 10)
        product, other = honest(rows, "gradmm", row["against_size"]), honest(rows, row["arm"], row["size"])
        lead = [product[seed] - (other[0] if row["arm"] == "before" else other[seed]) for seed in SEEDS]
        assert row["difference"] == pytest.approx(statistics.fmean(lead))
        assert row["difference_half_width"] == pytest.approx(half_width(lead))
        outside = abs(statistics.fmean(lead)) > half_width(lead)
        assert row["verdict"] == (("higher" if row["difference"] > 0 else "lower") if outside else "within noise")


def test_a_rival_is_compared_with_the_product_under_its_guarantee() -> None:
    sizes = [5, 10]
    against = {
        "zero-shot": "gradmm",
        "gradmm, epsilon 0.05": "gradmm",
        "epsvec, epsilon 0.05": "gradmm, epsilon 0.05",
        "epsvec, soft labels, epsilon 1": "gradmm, epsilon 1",
    }
    rows = evaluations(arm_sizes=dict.fromkeys(["gradmm", "gradmm, epsilon 1", *against], sizes))
    table = compare_arms(rows).set_index(["arm", "size"])
    for (arm, product), size in itertools.product(against.items(), sizes):
        assert table.loc[(arm, size), "against"] == product
        accuracies = honest(rows, product, size), honest(rows, arm, size)
        lead = [accuracies[0][seed] - accuracies[1][seed] for seed in SEEDS]
        assert table.loc[(arm, size), "difference"] == pytest.approx(statistics.fmean(lead))
    page = "\n\n".join(comparison_tables(table.reset_index()))
    assert "A rival is compared with gradmm under the same epsilon." in page
    with pytest.raises(KeyError):
        compare_arms(rows[rows["arm"] != "gradmm, epsilon 1"])


def test_intervals_over_rows_are_of_means_over_seeds(table: pd.DataFrame) -> None:
    rows = evaluations()
    for row in table.to_dict("records"):
        correct = {seed: each["correct"] for seed, each in chosen(rows, row["arm"], row["size"]).items()}
        expected = interval_over_rows(np.mean([*correct.values()], axis=0))
        assert (row["accuracy_rows_low"], row["accuracy_rows_high"]) == pytest.approx(expected)
        if row["arm"] == "gradmm":
            assert pd.isna(row["difference_rows_low"])
            continue
        product = chosen(rows, "gradmm", row["against_size"])
        gains = [
            product[seed]["correct"].astype(float) - correct[0 if row["arm"] == "before" else seed]
            for seed in SEEDS
        ]
        expected = interval_over_rows(np.mean(gains, axis=0))
        assert (row["difference_rows_low"], row["difference_rows_high"]) == pytest.approx(expected)
        assert row["difference_rows_low"] < row["difference"] < row["difference_rows_high"]


def test_pairing_does_not_depend_on_the_order_of_rows(table: pd.DataFrame) -> None:
    shuffled = evaluations()
    first = [i for i in shuffled.index if shuffled["arm"][i] != "zero-shot"]
    rest = sorted(set(shuffled.index) - set(first), reverse=True)
    again = compare_arms(shuffled.loc[[*first, *rest]], measures()).set_index(["arm", "size"])
    for figure in ("difference", "difference_half_width", "accuracy"):
        expected = table.set_index(["arm", "size"])[figure]
        assert again[figure].to_dict() == pytest.approx(expected.to_dict(), nan_ok=True)


def test_an_arm_without_one_of_the_seeds_is_not_compared() -> None:
    rows = evaluations()
    with pytest.raises(KeyError):
        compare_arms(rows[(rows["arm"] != "zero-shot") | (rows["seed"] != 2)], measures())


def test_two_seeds_have_neither_interval_nor_verdict() -> None:
    table = compare_arms(evaluations((0, 1)), measures())
    assert table["accuracy_half_width"].isna().all()
    assert set(table["verdict"].dropna()) == {"too few seeds"}
    page = "\n\n".join(comparison_tables(table))
    assert "±" not in page
    assert "Too few seeds to tell differences from noise" in page
    assert "differences are within noise" not in page
    assert "by chance" not in page


def test_an_arm_with_a_diverged_run_has_no_accuracy_and_no_lead(table: pd.DataFrame) -> None:
    rows = evaluations()
    diverged = (rows["arm"] == "real-1k") & (rows["seed"] == 1)
    rows.loc[diverged, ["accuracy", "loss"]] = [0.0, math.nan]
    found = with_gap_recovered(compare_arms(rows, measures()))
    of_arm = found["arm"] == "real-1k"
    (row,) = found[of_arm].to_dict("records")
    for figure in (
        "accuracy",
        "best_on_test",
        "difference",
        "accuracy_rows_low",
        "difference_rows_high",
        "verdict",
    ):
        assert pd.isna(row[figure])
    pd.testing.assert_frame_equal(found[~of_arm], table[~of_arm], check_dtype=False)
    assert "\n".join(comparison_tables(found)).count("diverged") == 3


def test_a_lead_is_shown_at_every_size_although_arms_differ_in_sizes() -> None:
    table = compare_arms(evaluations(), measures())
    few = table[(table["arm"] == "zero-shot") & (table["size"] == 5)].assign(arm="few")
    rest = table[(table["arm"] != "zero-shot") | (table["size"] == 10)]
    page = "\n\n".join(comparison_tables(pd.concat([rest, few])))
    grid = page.partition("## Lead of gradmm")[2].partition("##")[0].splitlines()
    assert "| arm | 5 | 10 |" in grid
    (line,) = [line for line in grid if line.startswith("| few ")]
    assert line.endswith("|  |")
    assert line.count("within noise") + line.count("higher") + line.count("lower") == 1


def test_every_figure_of_the_markdown_is_from_the_table(table: pd.DataFrame) -> None:
    page = "\n\n".join(comparison_tables(table))
    assert "A rival" not in page
    lines = page.splitlines()
    for arm in ("zero-shot", "gradmm"):
        cells = [
            f"{row['accuracy']:.3f} ± {row['accuracy_half_width']:.3f} "
            f"({row['best_on_test']:.3f} ± {row['best_on_test_half_width']:.3f})"
            for row in table[table["arm"] == arm].to_dict("records")
        ]
        assert f"| {arm} | {' | '.join(cells)} |" in lines
    leads = [
        f"{row['difference']:+.3f} ± {row['difference_half_width']:.3f}, {row['verdict']} "
        f"({row['difference_rows_low']:+.3f} to {row['difference_rows_high']:+.3f})"
        for row in table.to_dict("records")
        if row["arm"] != "gradmm"
    ]
    assert f"| zero-shot | {leads[1]} | {leads[2]} |" in lines
    schedules = [f"{row['learning_rate']:g}, {row['steps']}" for row in table.to_dict("records")]
    assert f"| zero-shot | {schedules[1]} | {schedules[2]} |" in lines
    assert f"- real-1k: {schedules[3]}" in lines
    assert f"- before fine-tuning: {schedules[0]}" not in lines
    assert f"- before fine-tuning: {leads[0]} (against 10 texts of gradmm)" in lines
    assert f"- real-1k: {leads[3]} (against 10 texts of gradmm)" in lines
    (real,) = table[table["arm"] == "real-1k"].to_dict("records")
    assert any(line.startswith(f"- real-1k: {real['accuracy']:.3f} ±") and "900 texts" in line for line in lines)
    assert f"- before fine-tuning: {table['accuracy'][0]:.3f}" in lines
    within = (table["verdict"] == "within noise").sum()
    assert f"{within} of 4 differences are within noise" in page
    assert f"about {4 * 0.05:.1f} of them" in page
    read = table[(table["arm"] == "gradmm") & (table["size"] == 10)].to_dict("records")[0]
    assert f"| gradmm | {read['log_perplexity']:.2f} | {read['distinct_2']:.3f} |" in page


def accuracies_of(before: float, all_rows: float, *gradmm: float) -> pd.DataFrame:
    """Make a table of mean accuracies, of the product at several sizes."""
    arms = ["before", "all rows", *["gradmm"] * len(gradmm)]
    return pd.DataFrame({"arm": arms, "accuracy": [before, all_rows, *gradmm]})


def test_the_gap_recovered_is_a_share_of_that_between_the_model_and_all_rows() -> None:
    recovered = with_gap_recovered(accuracies_of(0.6, 0.8, 0.7, 0.75, 0.55, 0.9))["gap_recovered"]
    assert recovered.tolist() == pytest.approx([0.0, 1.0, 0.5, 0.75, -0.25, 1.5])


@pytest.mark.parametrize("gap", [0.0, 1e-16, -0.1, MIN_GAP / 2, math.nan])
def test_without_a_ceiling_above_the_model_there_is_no_gap_to_recover(gap: float) -> None:
    assert with_gap_recovered(accuracies_of(0.6, 0.6 + gap, 0.7))["gap_recovered"].isna().all()
    assert with_gap_recovered(accuracies_of(0.6, 0.6 + 2 * MIN_GAP, 0.6))["gap_recovered"].notna().all()


@pytest.mark.parametrize("missing", ["before", "all rows"])
def test_without_either_end_there_is_no_gap_to_recover(missing: str) -> None:
    table = accuracies_of(0.6, 0.8, 0.7)
    assert with_gap_recovered(table[table["arm"] != missing])["gap_recovered"].isna().all()


def test_the_page_has_the_gap_recovered_by_every_arm(table: pd.DataFrame) -> None:
    ceiling = table[table["arm"] == "real-1k"].assign(arm="all rows", size=4000, accuracy=0.95)
    recovered = with_gap_recovered(pd.concat([table, ceiling], ignore_index=True))
    lines = "\n\n".join(comparison_tables(recovered)).splitlines()
    (start,) = (i for i, line in enumerate(lines) if line == "## Gap recovered")
    lines = lines[start : next(i for i, line in enumerate(lines) if line.startswith("## Lead"))]
    before = table["accuracy"][0]
    for arm in ("zero-shot", "gradmm"):
        accuracies = table.loc[table["arm"] == arm, "accuracy"]
        cells = [f"{(accuracy - before) / (0.95 - before):.0%}" for accuracy in accuracies]
        assert f"| {arm} | {' | '.join(cells)} |" in lines
    assert {"- before fine-tuning: 0%", "- all rows: 100%"} <= set(lines)
    level = recovered.assign(gap_recovered=math.nan)
    page = "\n\n".join(comparison_tables(level))
    assert "None: fine-tuning on all rows does not exceed the model before fine-tuning." in page
    assert "Gap recovered" not in "\n\n".join(comparison_tables(table))


def test_without_baselines_there_is_still_a_page(table: pd.DataFrame) -> None:
    page = "\n\n".join(comparison_tables(table[table["arm"] == "gradmm"]))
    assert "| gradmm |" in page
    assert "Lead" not in page


def test_the_plot_has_every_arm_and_those_of_one_size_as_horizontal_lines(table: pd.DataFrame) -> None:
    figure = study_plots.accuracy_by_size(table)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["before", "real-1k", "zero-shot", "gradmm"]
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["5", "10"]
    error_bars: list[Any] = axes.containers
    drawn = {str(bars.get_label()): bars.lines[0].get_ydata().tolist() for bars in error_bars}
    assert drawn == {arm: table.loc[table["arm"] == arm, "accuracy"].tolist() for arm in ("zero-shot", "gradmm")}
    for arm, bars in zip(("zero-shot", "gradmm"), error_bars, strict=True):
        (segments,) = bars.lines[2]
        reach = [(ends[1, 1] - ends[0, 1]) / 2 for ends in segments.get_segments()]
        assert reach == pytest.approx(table.loc[table["arm"] == arm, "accuracy_half_width"].tolist())
    lines = [line for line in axes.get_lines() if line.get_label() in ARM_SIZES]
    across = {line.get_label(): np.asarray(line.get_ydata())[0] for line in lines}
    assert across["before"] == pytest.approx(table["accuracy"][0])
    assert "gradmm" in str(figure.get_label())


def test_a_comparison_of_one_size_has_a_plot_too(table: pd.DataFrame) -> None:
    one = table[table["size"].isin([0, 10, 1000])]
    (axes,) = study_plots.accuracy_by_size(one).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["10"]


def test_where_every_run_has_diverged_the_plot_is_empty(table: pd.DataFrame) -> None:
    diverged = table.astype(object).assign(accuracy=None, accuracy_half_width=None)
    (axes,) = study_plots.accuracy_by_size(diverged[diverged["arm"] == "gradmm"]).axes
    (bars,) = axes.containers
    assert np.isnan(np.asarray(bars.lines[0].get_ydata(), float)).all()  # pyright: ignore


def test_the_folder_has_tables_pictures_and_how_they_were_made(table: pd.DataFrame, tmp_path: Path) -> None:
    root = Root(path=tmp_path)
    root.prepare()
    artifact = root.write_stage("compare", "key", table, {}, {})
    stage = StageRecord(cached=False, seconds=1.0, **artifact.model_dump())
    privacy, recipe = PrivacySettings(epsilon=0.5, delta=1e-5), load_recipe(find_recipe("sst2"))
    private = guarantee(privacy, gaussian_mechanism(privacy))
    record = StudyRecord(
        run_id="20260101T000000Z-sst2-compare",
        recipe=recipe,
        plan=release_plan(recipe),
        guarantee=guarantee(PrivacySettings(), None),
        data={"test": {"rows": 872}},
        model={"digest": "0123456789abcdef"},
        started=datetime(2026, 1, 2, tzinfo=UTC),
        seconds=1.0,
        versions=library_versions(),
        stages=[stage],
        study="compare",
        machine="64 cores, one GPU",
        command=("gradmm", "compare", "sst2", "--set", "a.b=c d"),
        commit="c0ffee",
        arms=("gradmm",),
        sizes=(5, 10),
        seeds=SEEDS,
        guarantees={"gradmm, epsilon 0.5": private},
    )
    first, second = (write_study(root, record, study_page(record), study_pictures(record)) for _ in range(2))
    assert (first.run_id, second.run_id) == (record.run_id, f"{record.run_id}-2")
    for each in (first, second):
        folder = root.runs / each.run_id
        assert {file.name for file in folder.iterdir()} == {
            "tables.md",
            "accuracy.svg",
            "accuracy.png",
            "run.json",
        }
        assert StudyRecord.model_validate_json((folder / "run.json").read_text()) == each
    page = (root.runs / first.run_id / "tables.md").read_text()
    assert page == study_page(first)
    for words in (
        "Not for publication",
        private.sentence,
        record.guarantee.sentence,
        "`gradmm compare sst2 --set 'a.b=c d'`",
        "commit c0ffee",
        "64 cores, one GPU",
        "2026-01-02",
        "torch",
        "0123456789ab",
        "Seeds 0, 1, 2, 3",
        "872 test rows",
        "standard error of up to 0.017",
    ):
        assert words in page


def test_the_commit_is_that_of_the_checkout() -> None:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("not a git checkout")
    assert str(source_commit()).removesuffix("-dirty") == head.stdout.strip()


def test_an_installation_inside_another_checkout_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr("gradmm.studies.record.__file__", str(tmp_path / "site-packages.py"))
    assert source_commit() is None
