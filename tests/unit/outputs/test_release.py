"""The release folder: readable by `datasets`, consistent with its guarantee, and free of private figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from markdown_it import MarkdownIt
from scipy.stats import norm
from upath import UPath

from gradmm.config.recipe import Recipe
from gradmm.config.settings import ExecutionSettings
from gradmm.outputs import release
from gradmm.outputs.record import RunRecord, StageRecord
from gradmm.outputs.release import RELEASE_FILES, TRAIN_FILE, check_release, write_release
from gradmm.privacy.guarantee import guarantee, rounded_up
from gradmm.privacy.mechanism import gaussian_delta
from gradmm.privacy.release_plan import release_plan
from gradmm.storage.location import Location, location, put
from tests.object_store import objects

#: Texts with active markup.
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a | b \\| c | d",
    "[click](javascript:alert(1)) and ![x](https://evil.example/x.png)",
    "# no heading\n\n---\n- no list `code` **bold** _it_ $x^2$ ~~s~~",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; &amp;",
    "https://evil.example www.evil.example <https://evil.example>",
    "trailing backslash \\",
]

#: Figures measured on private data, unlike any number that a release may contain.
PLANTED = {
    "accuracy_before": 0.60311,
    "accuracy_synthetic": 0.71293,
    "accuracy_real": 0.73817,
    "clip_fraction": 0.41957,
    "advantage": 0.02837,
    "auc": 0.51779,
    "records": 48731,
    "copies": 90417,
    "data_digest": "d1ge57ofpr1va7eda7a",
    "path": "/private/where-the-data-lies",
    "hub": "acme/patients-2024",
    "model_folder": "/private/where-the-models-lie",
}


def texts_of(labels: dict[int, str], texts: list[str]) -> pd.DataFrame:
    """Return rows like those of the stage `labelling`; losses increase with the row."""
    others = 0.25 / (len(labels) - 1)
    rows = [
        {
            "id": f"{label}-{number:05d}",
            "label": label,
            "label_name": name,
            "text": text,
            "token_ids": [1, 2, 3],
            "matching_loss": 0.1 + 0.01 * number + 0.001 * label,
            "log_perplexity": 4.0 + 0.125 * number,
            "shard": 0,
            "token_passes": 61234.5,
            "loss_history": [0.5, 0.25],
            "predicted": label,
            "probability": 0.9,
            "rank": number + 1,
            "written_for": label,
            "probabilities": [0.75 if other == label else others for other in labels],
        }
        for label, name in labels.items()
        for number, text in enumerate(texts)
    ]
    return pd.DataFrame(rows)


def run_record(
    labels: dict[int, str],
    rows: int,
    model_revision: str | None = None,
    generation: dict[str, Any] | None = None,
    **privacy: Any,
) -> RunRecord:
    """Return a finished run with the figures `PLANTED`; private by default."""
    words = [" bad", " great", " odd"]
    classes = [
        {"label": label, "name": name, "verbaliser": word, "instruction": f"Write a {name} review."}
        for (label, name), word in zip(labels.items(), words, strict=False)
    ]
    model_name = "acme/model-9m" if model_revision else f"{PLANTED['model_folder']}/model-9m"
    recipe = Recipe.model_validate(
        {
            "name": "reviews",
            "description": "Film reviews in one sentence.",
            "data": {"path": PLANTED["path"], "hub": PLANTED["hub"]},
            "classes": classes,
            "model": {"name": model_name},
            "privacy": {"epsilon": 0.05, "declared_records": 50000} | privacy,
            "target_gradient": {"probe_share": 0.5, "token_share": 0},
            "generation": {"method": "search", "per_class": 2 * rows // len(labels)} | (generation or {}),
            "loss_selection": {"per_class": rows // len(labels)},
            "label_filter": {"exemplars": [{"text": "A warm, clever film.", "label": next(iter(labels))}]},
        }
    )
    left = {"kept": rows, "kept_by_label": {str(label): rows // len(labels) for label in labels}}
    quality = {
        "mean_matching_loss": 0.31234567,
        "mean_log_perplexity": 5.4321,
        "distinct_2": 0.91234,
        "self_bleu": 0.12345,
    }
    plan = release_plan(recipe)
    promise = guarantee(recipe.privacy, plan.mechanism)
    figures: dict[str, dict[str, Any]] = {
        "target_gradient": {
            "records": {str(label): PLANTED["records"] for label in labels},
            "clip_fraction": PLANTED["clip_fraction"],
            "sigma": promise.sigma,
            "cosine": dict.fromkeys(map(str, labels), 0.8713),
        },
        "generation": {
            "texts": 2 * rows,
            **quality,
            "token_passes_per_text": 61234.5,
            "target_shrinkage": dict.fromkeys(map(str, labels), 0.9123),
        },
        "label_filter": left | quality,
        "loss_selection": left | quality | {"set_matching_loss_before": 0.0821, "set_matching_loss": 0.0417},
        "category_balance": left | quality,
        "labelling": {
            "texts": rows,
            "texts_by_label": left["kept_by_label"],
            "expected_by_label": {label: float(count) for label, count in left["kept_by_label"].items()},
            "agreement": 0.8125,
            "confidence": 0.75,
            "entropy": 0.5623,
            "answer_offset": dict.fromkeys(map(str, labels), 0.0321),
            "classifier_offset": dict.fromkeys(map(str, labels), 0.0123),
            "class_shares": dict.fromkeys(map(str, labels), 0.5),
            "probe_shrinkage": 0.4321,
        },
        "finetune_eval": {
            "accuracy_before": PLANTED["accuracy_before"],
            "accuracy_synthetic": PLANTED["accuracy_synthetic"],
            "accuracy_synthetic_std": 0.0123,
            "accuracy_synthetic_best_on_test": 0.7222,
            "accuracy_synthetic_best_on_test_std": 0.0111,
            "learning_rate_synthetic": 1e-4,
            "steps_synthetic": 200,
            "accuracy_real": PLANTED["accuracy_real"],
            "accuracy_real_std": 0.0098,
            "accuracy_real_best_on_test": 0.7444,
            "accuracy_real_best_on_test_std": 0.0099,
            "learning_rate_real": 3e-5,
            "steps_real": 200,
        },
        "mia_audit": {
            "advantage": PLANTED["advantage"],
            "advantage_std": 0.0612,
            "auc": PLANTED["auc"],
            "auc_std": 0.0321,
            "tpr_at_1_fpr": 0.0213,
            "tpr_at_1_fpr_std": 0.0199,
            "tpr_at_01_fpr": 0.0117,
            "tpr_at_01_fpr_std": 0.0101,
            "power": 0.0871,
            "detectable_advantage": 0.1763,
            "test_records": 100,
        },
        "memorisation": {
            **{
                f"{measure}_{side}_{statistic}": 2.25
                for measure in ("nearest", "longest_run", "longest_substring")
                for side in ("member", "non_member")
                for statistic in ("mean", "max")
            },
            # No text has eight words.
            **{
                f"ngram_overlap_{side}_{statistic}": None
                for side in ("member", "non_member")
                for statistic in ("mean", "max")
            },
            "longest_run_any_member_max": 11,
            "copies_of_any_member": PLANTED["copies"],
            "share_nearer_member": 0.625,
            "sign_test_p": 0.0213,
        },
    }
    if recipe.privacy.epsilon is not None:
        figures["mechanism_audit"] = {
            "claimed_epsilon": recipe.privacy.epsilon,
            "confidence": 0.999,
            "sensitivity": 0.9999999,
            "noise": 1.00213,
            "noise_low": 0.99713,
            "noise_high": 1.00287,
            "draws": 100_000,
            "certified_epsilon": 0.0123,
            "expected_certified_epsilon": 0.0111,
            "one_run_certified_epsilon": 0.0,
            "one_run_expected_certified_epsilon": 0.0022,
            "auc": 0.505,
            "tpr_at_1_fpr": 0.0107,
            "tpr_at_01_fpr": 0.0011,
        }
    stages = [
        StageRecord(
            stage=stage,
            path=Path(f"/private/root/stages/{stage}/0123abcd.parquet"),
            sha256=f"{number:064x}",
            rows=2 * rows if stage in ("generation", "label_filter") else rows,
            figures=values,
            cached=number % 2 == 0,
            seconds=0.25 * 10**number,
        )
        for number, (stage, values) in enumerate(figures.items())
    ]
    return RunRecord(
        run_id="20250102T030405Z-reviews",
        recipe=recipe,
        plan=plan,
        guarantee=promise,
        data={"train": {"split": "train", "digest": PLANTED["data_digest"], "rows": PLANTED["records"]}},
        model={"name": model_name, "revision": model_revision, "digest": "m0de1d19e57", "dtype": "float32"},
        started=datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC),
        seconds=7530.0,
        versions={"python": "3.11.9", "gradmm": "0.1.0", "torch": "2.8.0"},
        stages=stages,
    )


SENTIMENT = {0: "negative", 1: "positive"}


@pytest.fixture
def texts() -> pd.DataFrame:
    return texts_of(SENTIMENT, [f"a sentence about film {i}" for i in range(6)])


@pytest.fixture
def private_run() -> RunRecord:
    return run_record(SENTIMENT, rows=12)


def card(folder: Location) -> str:
    return (folder / "README.md").read_text()


def front_matter(folder: Location) -> dict[str, Any]:
    return yaml.safe_load(card(folder).split("---\n")[1])


def rendered(folder: Location) -> str:
    """Render the card's body with raw HTML enabled."""
    body = card(folder).split("---\n", 2)[2]
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(body)


def load(folder: Location, cache: Path) -> Any:
    from datasets import load_dataset

    return load_dataset(str(folder), split="train", cache_dir=str(cache))


def test_release_holds_the_allowed_files_and_nothing_else(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    folder = tmp_path / "release"
    assert write_release(folder, private_run, texts) == folder
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == RELEASE_FILES
    assert [p.name for p in tmp_path.iterdir()] == ["release"]


def test_datasets_loads_the_folder_with_texts_and_class_labels(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    data = load(write_release(tmp_path / "release", private_run, texts), tmp_path / "cache")
    assert data.features["label"].names == ["negative", "positive"]
    assert data["text"][:] == texts["text"].tolist()
    assert data["label"][:] == texts["label"].tolist()
    columns = ["text", "label", "p_negative", "p_positive", "matching_loss", "log_perplexity"]
    assert list(data.features) == columns
    assert data["p_negative"][:] == [0.75 if label == 0 else 0.25 for label in data["label"]]
    assert data["matching_loss"][:] == texts["matching_loss"].tolist()


def test_datasets_loads_each_release_although_all_have_one_name(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    """The library caches by name. A release that has just been made must not turn out to be an earlier one."""
    other = texts.assign(text=texts["text"] + " !")
    for name, made in (("one", texts), ("other", other)):
        folder = write_release(tmp_path / name / "release", private_run, made)
        cache = str(tmp_path / "cache")
        assert load(folder, tmp_path / "cache")["text"][:] == made["text"].tolist()
        hard = datasets.load_dataset(str(folder), "hard", split="train", cache_dir=cache)
        assert set(hard["text"]) <= set(made["text"])


def test_the_configuration_hard_repeats_texts_with_labels_in_proportion(tmp_path: Path) -> None:
    labels = {1: "positive", 0: "negative"}
    texts = texts_of(labels, ["a", "b"])
    folder = write_release(tmp_path / "release", run_record(labels, 4), texts)
    hard = datasets.load_dataset(str(folder), "hard", split="train", cache_dir=str(tmp_path / "cache"))
    assert hard.features["label"].names == ["negative", "positive"]
    counts = Counter(zip(hard["text"], hard["label"], strict=True))
    # Each text stands for both classes: 7.5 and 2.5 of ten copies of one row, and 2.5 and 7.5 of the other's.
    assert Counter(hard["text"]) == {"a": 20, "b": 20}
    assert all(9 <= count <= 11 for count in counts.values())
    assert abs(Counter(hard["label"])[1] - 20) <= 1


def test_class_labels_follow_the_labels_where_those_are_0_to_k_minus_1_in_any_order(tmp_path: Path) -> None:
    labels = {1: "positive", 0: "negative"}
    texts = texts_of(labels, ["a", "b"])
    data = load(write_release(tmp_path / "release", run_record(labels, 4), texts), tmp_path / "cache")
    assert data.features["label"].names == ["negative", "positive"]
    assert data["label"][:] == [1, 1, 0, 0]


def test_class_labels_are_positions_in_the_recipe_for_other_labels_and_the_card_says_so(
    tmp_path: Path,
) -> None:
    labels = {7: "joy", 3: "anger"}
    folder = write_release(tmp_path / "release", run_record(labels, 4), texts_of(labels, ["a", "b"]))
    data = load(folder, tmp_path / "cache")
    assert data.features["label"].names == ["joy", "anger"]
    assert data["label"][:] == [0, 0, 1, 1]
    assert "| 0 | joy | 7 | 2 |" in card(folder)
    assert "positions in the recipe" in card(folder)


def test_text_of_an_unknown_label_is_refused_and_nothing_is_left(tmp_path: Path, private_run: RunRecord) -> None:
    with pytest.raises(KeyError):
        write_release(tmp_path / "release", private_run, texts_of({0: "negative", 5: "?"}, ["a"]))
    assert not list(tmp_path.iterdir())


def test_no_private_figure_is_in_any_file(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    folder = write_release(tmp_path / "release", private_run, texts)
    for file in RELEASE_FILES:
        content = (folder / file).read_bytes()
        for name, value in PLANTED.items():
            forms = {str(value)}
            if isinstance(value, float):
                forms |= {f"{100 * value:.1f}", f"{value:.4g}", f"{100 * value:.2f}"}
            if isinstance(value, int):
                forms |= {f"{value:,}", f"{value * len(SENTIMENT)}"}
            assert not [form for form in forms if form.encode() in content], (file, name)
        assert b"private/" not in content, file


def test_release_does_not_depend_on_anything_the_stages_measured(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    """Other figures, times, paths and digests give the same bytes."""
    other = private_run.model_copy(
        update={
            "stages": [],
            "data": {},
            "run_id": "other",
            "started": datetime(1999, 1, 1, tzinfo=UTC),
            "seconds": 1.0,
            "recipe": private_run.recipe.model_copy(
                update={"data": private_run.recipe.data.model_copy(update={"path": "/elsewhere", "hub": None})}
            ),
        }
    )
    first = write_release(tmp_path / "first", private_run, texts)
    second = write_release(tmp_path / "second", other, texts.copy())
    for file in RELEASE_FILES:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_card_gives_every_term_of_the_guarantee(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    folder = write_release(tmp_path / "release", private_run, texts)
    promise, html = private_run.guarantee, rendered(folder)
    assert f"<blockquote>\n<p>{promise.sentence}</p>" in html
    for term, value in [
        ("unit of privacy", "one record"),
        ("adjacency", "add-or-remove"),
        ("epsilon", "0.05"),
        ("delta", rounded_up(promise.delta or 0.0, 4)),
        ("sensitivity", "1"),
        ("noise standard deviation sigma, per coordinate", f"{promise.sigma:.6g}"),
        ("clipping norm C", "1"),
        (
            "target space",
            "public-subspace of 16 dimensions, centred on the gradient of public text; "
            "50% of C squared for a probe",
        ),
        ("noise sampler", "floating-point"),
        ("releases under the same root, from these data or others", "1"),
        ("composed epsilon of all releases", "0.05"),
        ("accountant", promise.accountant),
        ("noise calibration", "analytic"),
    ]:
        assert f"<td>{term}</td>\n<td>{value}</td>" in html, term
    for words in (
        "declared number of records (50000)",
        "exemplars",
        "verbalisers",
        "instructions",
        "Not covered",
    ):
        assert words in html, words
    assert "differential-privacy" in front_matter(folder)["tags"]


#: Settings of generation, and their description on the card and in the report.
WAYS = [
    (
        {"search": {"draws": 20, "rounds": 6}},
        "Each text is the best of 20 samples of the model after a public instruction, "
        "improved by single-word edits in 6 rounds.",
    ),
    (
        {"method": "admm", "admm": {"iterations": 30}},
        "by 30 iterations of ADMM over embeddings, projected onto words that the model finds likely",
    ),
    (
        {"method": "admm", "admm": {"iterations": 7}, "projection": {"rule": "nearest"}},
        "by 7 iterations of ADMM over embeddings, projected onto words.",
    ),
    (
        {"search": {"draws": 150, "rounds": 0}},
        "Each text is the best of 150 samples of the model after a public instruction.",
    ),
    (
        {"search": {"draws": 1, "rounds": 0}},
        "Texts are the model's samples after a public instruction; the target was not used.",
    ),
]


@pytest.mark.parametrize(("generation", "words"), WAYS)
def test_card_says_how_the_sentences_were_made(
    tmp_path: Path, texts: pd.DataFrame, generation: dict[str, Any], words: str
) -> None:
    run = run_record(SENTIMENT, 12, generation=generation)
    html = rendered(write_release(tmp_path / "release", run, texts))
    assert words in html.split("<h2>Method")[1].split("<h2>")[0]


@pytest.mark.parametrize(("strength", "tilted"), [(1.0, True), (0.0, False)])
def test_card_says_whether_token_rates_tilted_the_words(
    tmp_path: Path, texts: pd.DataFrame, strength: float, tilted: bool
) -> None:
    run = run_record(SENTIMENT, 12, generation={"method": "written"})
    tilt = run.recipe.word_tilt.model_copy(update={"strength": strength})
    run = run.model_copy(update={"recipe": run.recipe.model_copy(update={"word_tilt": tilt})})
    target = run.plan.target.model_copy(update={"token_share": 0.3})
    run = run.model_copy(update={"plan": run.plan.model_copy(update={"target": target})})
    html = rendered(write_release(tmp_path / "release", run, texts))
    assert ("words were tilted towards the released token rates" in html) == tilted
    assert ("the target was not used" in html) == (not tilted)
    assert "the naive Bayes classifier of tokens" in html
    assert "for a linear probe and with the rates of the tokens" in " ".join(html.split())


def test_card_names_no_probe_where_none_is_released(tmp_path: Path, texts: pd.DataFrame) -> None:
    pages = []
    for records in (50000, 8000, 500):  # 8,000 are too few for a second moment, 500 for class sums
        folder = tmp_path / str(records)
        pages.append(rendered(write_release(folder, run_record(SENTIMENT, 12, declared_records=records), texts)))
    assert ["50% of C squared for a probe" in page for page in pages] == [True, False, False]
    assert ["50% of C squared for the class sums of a probe" in page for page in pages] == [False, True, False]
    assert ["a linear probe" in page for page in pages] == [True, True, False]
    # Class sums alone choose no texts.
    assert ["by the loss of a linear probe" in page for page in pages] == [True, False, False]


def test_card_of_the_paper_calibration_names_no_accountant_and_says_where_its_proof_ends(
    tmp_path: Path, texts: pd.DataFrame
) -> None:
    run = run_record(SENTIMENT, 12, calibration="paper")
    html = rendered(write_release(tmp_path / "release", run, texts))
    assert "<td>accountant</td>\n<td>none</td>" in html
    assert "proved for epsilon up to 1 only" in html


@pytest.mark.parametrize(
    ("privacy", "words"),
    [({"epsilon": None}, "NO GUARANTEE"), ({"unsafe_noise_seed": 3}, "UNSAFE. Do not publish")],
)
def test_card_without_a_guarantee_says_so_first_and_carries_no_privacy_tag(
    tmp_path: Path, texts: pd.DataFrame, privacy: dict[str, Any], words: str
) -> None:
    run = run_record(SENTIMENT, 12, **privacy)
    folder = write_release(tmp_path / "release", run, texts)
    assert words in rendered(folder).split("<h2>")[0]
    assert "Nothing is covered" in card(folder)
    assert "differential-privacy" not in front_matter(folder)["tags"]
    assert json.loads((folder / "privacy.json").read_text())["safe"] is False
    kept_seed = yaml.safe_load((folder / "recipe.yaml").read_text())["privacy"]["unsafe_noise_seed"]
    assert kept_seed == privacy.get("unsafe_noise_seed")


def test_privacy_json_is_the_guarantee_and_its_sentence(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    folder = write_release(tmp_path / "release", private_run, texts)
    values = json.loads((folder / "privacy.json").read_text())
    assert values.pop("sentence") == private_run.guarantee.sentence
    assert values.pop("rho") == pytest.approx(values["mu"] ** 2 / 2)
    assert values["mu"] == pytest.approx(values["sensitivity"] / values["sigma"])
    curve, groups = values.pop("epsilon_at_delta"), values.pop("epsilon_of_records")
    for delta, epsilon in curve.items():
        assert gaussian_delta(1 / values["mu"], epsilon) == pytest.approx(float(delta), rel=1e-6)
    for count, epsilon in groups.items():
        assert gaussian_delta(1 / (int(count) * values["mu"]), epsilon) == pytest.approx(values["delta"], rel=1e-6)
    assert groups["1"] == pytest.approx(private_run.guarantee.epsilon, rel=1e-6)
    html = rendered(folder)
    assert f"<td>10</td>\n<td>{rounded_up(groups['10'], 3)}</td>" in html
    # The better of all thresholds between N(0, 1) and N(mu, 1).
    thresholds = np.linspace(-3, 3, 2001)
    correct = (norm.cdf(thresholds) + norm.sf(thresholds - values["mu"])) / 2
    assert values.pop("correct_guesses_at_most") == pytest.approx(correct.max(), rel=1e-6)
    assert f"most {math.ceil(1000 * correct.max()) / 10:.1f}% of cases" in html
    detected = norm.sf(norm.isf(0.01) - values["mu"])
    in_words = values.pop("in_words")
    assert in_words in html
    assert in_words.endswith(
        f"rate of 1% the attack detects at most {math.ceil(1000 * detected) / 10:.1f}% of those that were."
    )
    for delta, epsilon in curve.items():
        assert f"<td>{float(delta):g}</td>\n<td>{rounded_up(epsilon, 3)}</td>" in html
    assert type(private_run.guarantee).model_validate(values) == private_run.guarantee


def test_recipe_is_complete_once_the_data_is_named_again(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    folder = write_release(tmp_path / "release", private_run, texts)
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert values["data"]["path"] is None
    assert values["data"]["hub"] is None
    assert values["model"]["name"] == "model-9m"
    values["data"] |= {"path": PLANTED["path"], "hub": PLANTED["hub"]}
    values["model"]["name"] = private_run.recipe.model.name
    assert Recipe.model_validate(values) == private_run.recipe


def test_where_the_work_was_done_is_not_told(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    execution = ExecutionSettings(runner="ray", address="ray://our-cluster:10001")
    recipe = private_run.recipe.model_copy(update={"execution": execution})
    folder = write_release(tmp_path / "release", private_run.model_copy(update={"recipe": recipe}), texts)
    assert "execution" not in yaml.safe_load((folder / "recipe.yaml").read_text())
    assert not [file for file in folder.rglob("*") if file.is_file() and b"our-cluster" in file.read_bytes()]


@pytest.mark.parametrize("method", ["written", "search"])
def test_the_server_that_wrote_the_texts_is_not_told_but_its_model_is(
    tmp_path: Path, texts: pd.DataFrame, method: str
) -> None:
    endpoint = {"url": "http://our-cluster:8000/v1", "model": "/our-cluster/llama-70b"}
    run = run_record(SENTIMENT, 12, generation={"method": method, "endpoint": endpoint})
    folder = write_release(tmp_path / "release", run, texts)
    assert not [file for file in folder.rglob("*") if file.is_file() and b"our-cluster" in file.read_bytes()]
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["generation"]["endpoint"] is None
    text = " ".join(card(folder).split())
    assert "samples of the served model llama-70b" in text or "the served model llama-70b's samples" in text
    assert "tilted" not in text


@pytest.mark.parametrize("name", ["model-9m", "../models/model-9m/", "C:\\models\\model-9m", "models/model-9m"])
def test_model_folder_is_reduced_to_its_last_component_and_a_hub_id_is_kept(
    private_run: RunRecord, name: str
) -> None:
    recipe = private_run.recipe
    local = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": name})})
    assert release.public_model_name(private_run.model_copy(update={"recipe": local})) == "model-9m"
    assert release.public_model_name(run_record(SENTIMENT, 12, model_revision="c0ffee")) == "acme/model-9m"


@pytest.mark.parametrize(
    ("rows", "category"), [(2, "n<1K"), (1000, "1K<n<10K"), (10**5, "100K<n<1M"), (10**6, "n>1M")]
)
def test_front_matter_is_what_the_hub_reads(private_run: RunRecord, rows: int, category: str) -> None:
    tables = {release.TRAIN_FILE: b"a", release.HARD_FILE: b"b"}
    fields = yaml.safe_load(release._front_matter(private_run.recipe, private_run.guarantee, rows, tables))
    assert fields["size_categories"] == [category]
    assert fields["task_categories"] == ["text-classification"]
    assert fields["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-*.parquet"}]
    assert fields["tags"] == ["synthetic", "differential-privacy"]
    assert "license" not in fields


def test_hostile_texts_names_and_descriptions_are_shown_as_text(tmp_path: Path) -> None:
    labels = {0: "<b>|bad|</b>", 1: HOSTILE[1]}
    for start in range(0, len(HOSTILE), release.SHOWN_PER_CLASS):
        shown = HOSTILE[start : start + release.SHOWN_PER_CLASS]
        run = run_record(labels, 2 * len(shown))
        description = "# no heading\n---\npretty_name: hacked\n---\n" + HOSTILE[0]
        run = run.model_copy(update={"recipe": run.recipe.model_copy(update={"description": description})})
        folder = write_release(tmp_path / str(start), run, texts_of(labels, shown))
        html = rendered(folder)
        for markup in (
            "<script",
            "<img",
            "<a ",
            "<b>",
            "<h1># ",
            "<li>no",
            "<em>it",
            "<strong>bold",
            "<s>",
            "49",
        ):
            assert markup not in html, markup
        assert html.count("<h1>") == 1
        assert front_matter(folder)["pretty_name"] == "reviews (synthetic)"
        table = html.split("<h2>Examples</h2>")[1]
        assert table.count("<tr>") == 1 + 2 * len(shown)
        assert table.count("<td>") == 4 * len(shown)


def test_existing_release_is_never_overwritten(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    folder = write_release(tmp_path / "release", private_run, texts)
    before = (folder / TRAIN_FILE).read_bytes()
    with pytest.raises(OSError):
        write_release(folder, private_run, texts.head(2))
    assert (folder / TRAIN_FILE).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["release"]


def test_failed_release_leaves_nothing(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_publish = release.publish

    def publish_and_fill_the_disk(path: Path, content: bytes) -> None:
        if path.name == "recipe.yaml":
            raise OSError(28, "No space left on device")
        real_publish(path, content)

    monkeypatch.setattr(release, "publish", publish_and_fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        write_release(tmp_path / "release", private_run, texts)
    assert not list(tmp_path.iterdir())


def test_release_with_a_stranger_among_its_files_is_refused_before_it_is_published(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_publish = release.publish

    def publish_with_company(path: Path, content: bytes) -> None:
        real_publish(path, content)
        real_publish(path.with_suffix(".bak"), content)

    monkeypatch.setattr(release, "publish", publish_with_company)
    with pytest.raises(ValueError, match=r"README\.bak"):
        write_release(tmp_path / "release", private_run, texts)
    assert not list(tmp_path.iterdir())


def test_check_refuses_a_missing_file_a_link_and_a_stranger(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    folder = tmp_path / "release"
    write_release(folder, private_run, texts)
    check_release(folder)
    os.rename(folder / "privacy.json", tmp_path / "privacy.json")
    with pytest.raises(ValueError, match=r"missing: \['privacy.json'\]"):
        check_release(folder)
    (folder / "privacy.json").symlink_to(tmp_path / "privacy.json")
    with pytest.raises(ValueError, match=r"not allowed: \['privacy.json'\]"):
        check_release(folder)


def test_parquet_holds_no_trace_of_other_columns(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    folder = write_release(tmp_path / "release", private_run, texts)
    schema = pq.read_schema(folder / TRAIN_FILE)
    assert schema.names == ["text", "label", "p_negative", "p_positive", "matching_loss", "log_perplexity"]
    assert set(schema.metadata) == {b"huggingface"}


def test_import_is_light() -> None:
    code = (
        "import sys, gradmm.outputs.release, gradmm.outputs.report;"
        "print([m for m in ('torch', 'transformers', 'datasets', 'sklearn', 'prefect') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# Object stores


def test_a_store_gets_the_same_files_as_a_folder(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    store = location(f"memory://{uuid4().hex}")
    assert isinstance(store, UPath)
    local = write_release(tmp_path / "release", private_run, texts)
    far = write_release(store / "release", private_run, texts)
    check_release(far)
    assert objects(store) == {f"release/{name}": (local / name).read_bytes() for name in RELEASE_FILES}
    with pytest.raises(FileExistsError):
        write_release(store / "release", private_run, texts_of(SENTIMENT, ["other", "texts"]))
    assert objects(store) == {f"release/{name}": (local / name).read_bytes() for name in RELEASE_FILES}
    put(store / "release" / "data" / "train.csv", b"")
    with pytest.raises(ValueError, match=r"not allowed: \['data/train\.csv'\]"):
        check_release(far)


def test_nothing_reaches_a_store_that_was_not_checked_here(
    private_run: RunRecord, texts: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = location(f"memory://{uuid4().hex}")
    assert isinstance(store, UPath)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(release, "RELEASE_FILES", RELEASE_FILES - {"recipe.yaml"})
    with pytest.raises(ValueError, match=r"not allowed: \['recipe\.yaml'\]"):
        write_release(store / "release", private_run, texts)
    assert objects(store) == {}
    assert not list(tmp_path.iterdir())
