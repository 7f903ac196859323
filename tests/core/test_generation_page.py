"""The page of `benchmarks.generation_methods`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generation_page import front, page, read_results, table

ABOUT = {"recipe": "sst2", "model": "small", "space": "default", "epsilon": None}
ABOUT |= {"date": "2026-01-02", "commit": "abc", "machine": "2 cores"}


def result(method: str, seed: int, accuracy: float, **figures: Any) -> dict[str, Any]:
    return ABOUT | {"method": method, "seed": seed, "accuracy": accuracy, "auc": accuracy} | figures


def texts_of(method: str, seed: int, accuracy: float, loss: float) -> dict[str, Any]:
    figures = {"texts": 2, "matching_loss": loss, "set_loss": loss / 2, "distance": loss, "set_distance": loss}
    figures |= {"shares": [0.5, 1.0], "log_perplexity": 4.0, "distinct_2": 0.5, "self_bleu": 0.1}
    figures |= {"token_passes": 1234.0, "sample": [f"{method} `{seed}`", "a\nb"]}
    return result(method, seed, accuracy, **figures)


@pytest.fixture
def results(tmp_path: Path) -> list[Path]:
    first = [result("before", 0, 0.5), *(result("real", seed, 0.6) for seed in range(3))]
    first += [texts_of("search", seed, 0.7 + seed / 100, 0.01 * (1 + seed)) for seed in range(3)]
    second = [result("before", 0, 0.5), *(texts_of("rerank", seed, 0.68 + seed / 100, 0.2) for seed in range(4))]
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file, rows in zip(files, (first, second), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def cells(results: list[Path], method: str) -> dict[str, str]:
    """Of a method's line, by the headings."""
    head, _, *lines = (line.strip("| ").split(" | ") for line in table(read_results(results)).splitlines())
    (line,) = (line for line in lines if line[0].startswith(f"{method} ("))
    return dict(zip(head, line, strict=False))


def test_figures_are_means_over_seeds(results: list[Path]) -> None:
    search = cells(results, "search")
    assert search["mean f"] == "0.0200"
    assert search["f of the set"] == "0.0100"
    assert search["shares"] == "0.50 / 1.00"
    assert search["passes per text"] == "1,234"
    assert search["accuracy"] == "0.710 ± 0.025"  # 4.303 x 0.01 / sqrt(3)


def test_leads_are_over_the_seeds_that_both_have(results: list[Path]) -> None:
    assert cells(results, "rerank")["accuracy, ahead by"] == "+0.020 ± 0.000, higher"  # seed 3 has no search
    assert cells(results, "real")["accuracy, ahead by"] == "+0.110 ± 0.025, higher"


def test_the_state_before_is_one_and_the_same_for_all_seeds(results: list[Path]) -> None:
    before = cells(results, "before")
    assert before["method"] == "before (1)"
    assert before["accuracy, ahead by"] == "+0.210 ± 0.025, higher"
    assert before["mean f"] == ""


def test_the_page_has_where_figures_are_from_and_the_first_seeds_texts(results: list[Path]) -> None:
    text = page(read_results(results), "front.svg")
    assert "- `benchmarks.generation_methods`, 2026-01-02, commit abc, on 2 cores." in text
    assert text.count("2026-01-02") == 1
    assert "(front.svg)" in text
    assert "1. `search '0'`\n2. `a b`\n" in text
    assert "'1'" not in text


def test_the_plot_says_in_words_where_each_method_is(results: list[Path]) -> None:
    words = str(front(read_results(results)).get_label())
    assert words.startswith("search has f 0.020 at 4.00 nats with 1,234 passes; rerank has f 0.200 ")
    assert "real" not in words  # it has no texts of ours
