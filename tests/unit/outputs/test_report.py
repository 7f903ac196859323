"""The private report: complete, self-contained, and safe to open for any text."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gradmm.evaluation.finetune_eval import COLUMNS, CONFUSION, CORRECT
from gradmm.metrics.resemblance import Resemblance, resemblance
from gradmm.outputs import plot_style, plots
from gradmm.outputs.comparison import Comparison
from gradmm.outputs.descriptions import stage_figures, stage_result, stage_sentence, stage_title
from gradmm.outputs.glossary import GLOSSARY, entry, meanings
from gradmm.outputs.grades import RULES, grades
from gradmm.outputs.record import RunRecord
from gradmm.outputs.report import (
    ReportRows,
    best_and_worst,
    class_tables,
    costs,
    noise_cosines,
    resemblance_rows,
    shown_terms,
    write_report,
)
from gradmm.target.preflight import EXPECTED_SHIFT
from tests.unit.outputs.test_release import HOSTILE, PLANTED, SENTIMENT, WAYS, run_record, texts_of

#: Real texts. The report has figures of them, and none of their words.
REAL = [f"{word} clerk counted the ledgers of Aldermoor" for word in ("A", "The", "Some", "One", "Every")]

SVG = {"svg", "defs", "g", "path", "text", "use"}

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements with their attributes, and the visible text. Checks that elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "dt", "caption"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def tags(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in names]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def finetune_rows(seeds: int = 3, classes: int = 2) -> pd.DataFrame:
    """Return accuracies on test that increase with the step; validation and unchosen schedules differ."""
    rows = [("before", 0, 0.0, 0, 0, split, 0.60311, 0.7) for split in ("validation", "test")]
    for arm, chosen, top in (("synthetic", 1e-4, 0.71), ("real", 3e-5, 0.73)):
        for step in (50, 100, 150, 200):
            for split in ("validation", "test"):
                low = top - (200 - step) / 2000 - (0.2 if split == "validation" else 0.0)
                rows += [(arm, seed, chosen, 200, step, split, low + 0.01 * seed, 0.6) for seed in range(seeds)]
                rows += [
                    (arm, 0, rate, steps, step, split, 0.5, 2.0) for rate, steps in ((1e-2, 200), (chosen, 300))
                ]
    frame = pd.DataFrame(rows, columns=COLUMNS[:-1])
    # 400 negative and 600 positive rows; the share of right answers is the accuracy.
    right = (frame["accuracy"] * 1000).round().astype(int)
    others = [0] * (classes - 2)
    counts = pd.Series(
        [
            [n - n // 2, 400 - n + n // 2, *others, 600 - n // 2, n // 2, *others, *[0] * classes * len(others)]
            for n in right
        ]
    )
    return frame.assign(**{CORRECT: None, CONFUSION: counts.where(frame["split"] == "test", None)})


def audit_rows(runs: int = 10) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "run": range(runs),
            "threshold": [0.4 + 0.01 * i for i in range(runs)],
            "advantage": [0.01 * (i - 4) for i in range(runs)],
            "auc": 0.51,
            "tpr_at_1_fpr": 0.02,
            "tpr_at_01_fpr": 0.01,
            "roc": [[0.01, 0.02, *(k / 100 for k in range(2, 101))]] * runs,
            "power": 0.0871,
            "detectable_advantage": 0.1763,
            "test_records": 100,
        }
    )


def generated_rows() -> pd.DataFrame:
    return pd.DataFrame({"loss_history": [[0.5, 0.3, 0.2], [0.6, 0.4, 0.25]]})


def compared_with(texts: pd.DataFrame) -> Resemblance:
    return resemblance(texts["text"].tolist(), REAL, seed=0)


def report(tmp_path: Path, run: RunRecord, texts: pd.DataFrame, seeds: int = 3, audits: int = 10) -> Page:
    finetune = finetune_rows(seeds, len(run.recipe.classes))
    path = tmp_path / "report.html"
    rows = ReportRows(generated_rows(), texts, finetune, audit_rows(audits), compared_with(texts))
    write_report(path, run, rows)
    return Page(path.read_text())


def with_figures(run: RunRecord, stage: str, drop: tuple[str, ...] = (), **changes: Any) -> RunRecord:
    stages = [
        s.model_copy(update={"figures": {k: v for k, v in s.figures.items() if k not in drop} | changes})
        if s.stage == stage
        else s
        for s in run.stages
    ]
    return run.model_copy(update={"stages": stages})


@pytest.fixture
def with_plots() -> None:
    """For tests of the plots; the others leave them out, as they take most of a report's time."""


@pytest.fixture(autouse=True)
def without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "with_plots" not in request.fixturenames:
        monkeypatch.setattr(plots, "described", lambda figure, _: figure)
        monkeypatch.setattr(plot_style, "svg", lambda _: "")


@pytest.fixture
def texts() -> pd.DataFrame:
    return texts_of(SENTIMENT, [f"a sentence about film {i}" for i in range(10)])


@pytest.fixture
def private_run() -> RunRecord:
    return run_record(SENTIMENT, rows=20)


def test_verdict_gives_counts_accuracies_guarantee_and_what_the_audit_could_see(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    words = report(tmp_path, private_run, texts).words
    assert "PRIVATE REPORT: figures measured on private data; do not publish" in words
    assert "20 left of 40: 10 negative, 10 positive" in words
    assert "accuracy before 60.3%, on synthetic texts 71.3 ± 1.2%, on as many real texts 73.8 ± 1.0%" in words
    assert "± one standard deviation over 3 seeds" in words
    assert "synthetic texts 71.3 ± 1.2% 72.2 ± 1.1% 0.0001" in words
    assert "real texts 73.8 ± 1.0% 74.4 ± 1.0% 3e-05" in words
    assert private_run.guarantee.sentence in words
    assert "advantage +2.8 ± 6.1 points" in words
    assert "(100 members and 100 non-members; detectable with 80% power: 17.6 points)" in words


def test_verdict_begins_with_a_grade_of_each_aspect_whose_rule_is_in_the_glossary(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    words = report(tmp_path, private_run, texts).words
    line = " ".join(f"{aspect}: {grade} ({reason})" for aspect, grade, reason in grades(private_run))
    assert words.index(line) < words.index("20 left of 40")
    glossary = words[words.index("Glossary") :]
    assert all(f"{aspect} {rule}" in glossary for aspect, rule in RULES.items())


def test_one_seed_and_one_audit_run_show_no_spread(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    recipe = private_run.recipe
    once = {
        "finetune_eval": recipe.finetune_eval.model_copy(update={"seeds": (0,)}),
        "mia_audit": recipe.mia_audit.model_copy(update={"runs": 1}),
    }
    run = private_run.model_copy(update={"recipe": recipe.model_copy(update=once)})
    words = report(tmp_path, run, texts, seeds=1, audits=1).words
    assert "on synthetic texts 71.3%, on as many real texts 73.8%" in words
    assert "With one seed" in words
    assert "one seed: no interval" in words
    assert "advantage +2.8 points, AUC" in words


def test_figures_of_every_stage_appear(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    words = report(tmp_path, private_run, texts).words
    for stage in private_run.stages:
        assert stage_title(stage.stage) in words
        assert stage_sentence(stage.stage) in words
        assert stage_result(stage, private_run.recipe) in words
        assert stage.sha256 in words
        assert f"pd.read_parquet('{stage.path}')" in words
    assert f"clip fraction {PLANTED['clip_fraction']:.4g}" in words
    assert f"records negative {PLANTED['records']:,}, positive {PLANTED['records']:,}" in words
    assert "mean matching loss 0.3123" in words
    assert "distinct bigrams 0.9123; self-BLEU 0.1235" in words
    assert "token passes per text 61,234" in words
    assert "set matching loss before 0.0821; set matching loss 0.0417" in words
    assert "2 h 06 min" in words
    assert "2025-01-02 03:04 UTC" in words


def test_audit_of_the_mechanism_and_memorisation_have_tables_of_their_own(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    words = report(tmp_path, private_run, texts).words
    for stage in ("mechanism_audit", "mia_audit", "memorisation"):
        for term, value in stage_figures(private_run.stage(stage), private_run.recipe):
            assert f"{term} {value}" in words


def test_sentences_shown_are_the_ten_best_and_the_five_worst(tmp_path: Path, private_run: RunRecord) -> None:
    texts = texts_of(SENTIMENT, [f"film number {i:02d}." for i in range(12)]).sample(frac=1, random_state=0)
    words = report(tmp_path, private_run, texts).words
    best, worst = words.split("The 10 best")[1].split("Settings")[0].split("The 5 worst")
    assert best.index("film number 00.") < best.index("film number 04.")
    assert best.count("film number") == 10
    assert "film number 05." not in best
    assert worst.count("film number") == 5
    assert worst.index("film number 11.") < worst.index("film number 10.")
    assert "0.211 5.38" in " ".join(worst.split())


@pytest.mark.parametrize(("generation", "made"), WAYS)
def test_sentences_are_shown_with_how_they_were_made(
    tmp_path: Path, texts: pd.DataFrame, generation: dict[str, Any], made: str
) -> None:
    words = report(tmp_path, run_record(SENTIMENT, rows=20, generation=generation), texts).words
    assert made in words


def test_every_figure_of_a_run_is_in_the_glossary(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    """The figures that only some recipes have are added here."""
    run = with_figures(
        private_run, "target_gradient", probe_shrinkage=0.9, text_tokens={"0": 9.0}, token_sum_noise=0.1
    )
    area = {"auc": 0.52, "low": 0.49, "high": 0.55, "detectable_auc": 0.56}
    contamination = run.stages[-1].model_copy(
        update={
            "stage": "contamination",
            "figures": {"found": False, "areas": dict.fromkeys(("loss", "neighbours", "planted loss"), area)},
        }
    )
    run = run.model_copy(update={"stages": [*run.stages, contamination]})
    words = report(tmp_path, run, texts).words
    glossary = words[words.index("Glossary") :]
    assert "area by the model's loss" in glossary
    assert [term for term in shown_terms(run) if entry(term) not in GLOSSARY] == []
    for term, meaning in meanings(shown_terms(run)):
        assert f"{term} {meaning}" in glossary
    assert "coordinates" not in dict(meanings(shown_terms(run)))


def test_cost_and_time_are_those_of_the_computed_stages(private_run: RunRecord) -> None:
    found = dict(costs(private_run))
    computed = [stage for stage in private_run.stages if not stage.cached]
    assert found["whole run"] == "2 h 06 min"
    assert found["stages computed"] == f"{len(computed)} of {len(private_run.stages)}"
    assert found["longest stage"].startswith(stage_title(computed[-1].stage))
    assert found["token passes of generation"] == "2,449,380"  # 40 texts
    cached = [stage.model_copy(update={"cached": True}) for stage in private_run.stages]
    assert "longest stage" not in dict(costs(private_run.model_copy(update={"stages": cached})))


def test_few_sentences_are_not_shown_twice(tmp_path: Path, private_run: RunRecord) -> None:
    words = report(tmp_path, private_run, texts_of(SENTIMENT, ["only this."])).words
    assert words.count("only this.") == 2  # one of each class
    assert "worst" not in words


@pytest.mark.usefixtures("with_plots")
def test_hostile_texts_names_and_settings_are_shown_as_text(tmp_path: Path) -> None:
    labels = {0: HOSTILE[0], 1: HOSTILE[1]}
    run = run_record(labels, rows=2 * len(HOSTILE))
    recipe = run.recipe.model_copy(update={"description": "</pre></style><script>"})
    run = run.model_copy(update={"recipe": recipe})
    harmless = texts_of(SENTIMENT, ["a"] * len(HOSTILE))
    clean = report(tmp_path, run_record(SENTIMENT, rows=len(harmless)), harmless)
    page = report(tmp_path, run, texts_of(labels, HOSTILE))
    assert not page.tags("script", "img", "b", "iframe", "object", "link")
    # The plots of other names differ in their glyphs' places only, and the axis of a plot may need another tick.
    assert [tag for tag, _ in page.elements if tag not in SVG] == [
        tag for tag, _ in clean.elements if tag not in SVG
    ]
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in clean.elements}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    for text in HOSTILE[:5]:
        assert text in page.text, text


def test_page_asks_for_nothing_from_elsewhere(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    page = report(tmp_path, private_run, texts)
    html = (tmp_path / "report.html").read_text().replace(' xmlns="http://www.w3.org/2000/svg"', "")
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    for _, attributes in page.elements:
        assert not {"src", "xlink:href", "data", "action", "style"} & set(attributes)
    policy = next(m["content"] for m in page.tags("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for use in page.tags("use"):
        assert str(use["href"]).startswith("#")


def test_stages_are_linked_by_addresses_that_hold_where_the_root_is_moved(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    stages = [
        s.model_copy(update={"path": tmp_path / "stages" / s.stage / "a b.parquet"}) for s in private_run.stages
    ]
    folder = tmp_path / "runs" / "some-run"
    folder.mkdir(parents=True)
    page = report(folder, private_run.model_copy(update={"stages": stages}), texts)
    links = [link["href"] for link in page.tags("a") if not str(link["href"]).startswith("#")]
    assert links == [f"../../stages/{stage.stage}/a%20b.parquet" for stage in private_run.stages]


@pytest.mark.usefixtures("with_plots")
def test_plots_are_in_the_page_in_its_own_ink(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    page = report(tmp_path, private_run, texts)
    labels = [str(svg["aria-label"]) for svg in page.tags("svg")]
    assert [label.split(". ")[0] for label in labels] == [
        "What an observer cannot avoid",
        "Noisy and clean target",
        "Loss during generation",
        "Texts left after each stage",
        "Confidence of the labels",
        "Test accuracy by fine-tuning step",
        "Membership inference",
        "Lengths",
        "Map of the texts",
    ]
    assert "after category balance 10 negative, 10 positive" in labels[3]
    assert "on synthetic texts 72.0% after 200 steps" in labels[5]
    fills = {text["fill"] for text in page.tags("text")}
    assert fills == {"currentColor"}
    assert "bound of the guarantee" in page.words


@pytest.mark.usefixtures("with_plots")
def test_the_captions_name_what_their_plots_show(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    bound, grey = "Dashed: the highest curve that the guarantee allows", "Grey: curves that the audit tells"
    words = report(tmp_path, private_run, texts).words
    assert bound in words
    assert grey in words
    blind = with_figures(run_record(SENTIMENT, rows=20, epsilon=None), "mia_audit", detectable_advantage=None)
    words = report(tmp_path, blind, texts).words
    assert bound not in words
    assert grey not in words


def test_run_without_noise_has_no_plot_of_it(tmp_path: Path, texts: pd.DataFrame) -> None:
    words = report(tmp_path, run_record(SENTIMENT, rows=20, epsilon=None), texts).words
    assert "Noisy and clean target" not in words
    assert "bound of the guarantee" not in words


def test_expected_cosine_is_that_of_the_kind_of_target(private_run: RunRecord) -> None:
    names = private_run.recipe.class_names
    assert noise_cosines(private_run.plan, names, private_run.stages) == (
        {},
        dict.fromkeys(names.values(), 0.8713),
    )
    each = dict.fromkeys(map(str, names), 1.0)
    figures = {
        "coordinates": 32,
        "unclipped": each,
        "plain": dict.fromkeys(map(str, names), 0.5),
        "clip_scale": each,
    }
    space = private_run.stages[0].model_copy(update={"stage": "target_space", "figures": figures})
    run = private_run.model_copy(update={"stages": [space, *private_run.stages]})
    noise = run.stage("target_gradient").figures["sigma"] * 32**0.5
    for centred, signal in ((True, 25000 * EXPECTED_SHIFT), (False, 25000 * 0.5)):
        settings = run.plan.target.model_copy(update={"centred": centred})
        cosines = noise_cosines(run.plan.model_copy(update={"target": settings}), names, run.stages)
        assert cosines is not None
        assert list(cosines[0]) == list(names.values())
        for value in cosines[0].values():
            assert value == pytest.approx(signal / (signal**2 + noise**2) ** 0.5)


@pytest.mark.parametrize(("records", "gradients_part"), [(50000, 0.5), (8000, 0.5), (500, 1.0)])
def test_expected_cosine_is_of_what_a_probe_leaves_the_gradient(records: int, gradients_part: float) -> None:
    """In shares of C^2. With 500 records no probe is released, and with 8,000 its class sums alone."""
    run = run_record(SENTIMENT, rows=20, declared_records=records)
    all_clipped = {str(label): 1e6 for label in run.recipe.class_names}
    figures = {"coordinates": 32, "unclipped": all_clipped, "plain": all_clipped, "clip_scale": all_clipped}
    space = run.stages[0].model_copy(update={"stage": "target_space", "figures": figures})
    cosines = noise_cosines(run.plan, run.recipe.class_names, [space, *run.stages])
    mechanism = run.plan.mechanism
    assert cosines is not None
    assert mechanism is not None
    signal, noise = records / 2 * gradients_part**0.5, mechanism.sigma * 32**0.5
    for value in cosines[0].values():
        assert value == pytest.approx(signal / (signal**2 + noise**2) ** 0.5)


def test_page_can_be_read_aloud(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    page = report(tmp_path, private_run, texts)
    assert len(page.tags("caption")) == len(page.tags("table"))
    assert all("scope" in header for header in page.tags("th"))
    for svg in page.tags("svg"):
        named = svg.get("role") == "img" and {"aria-label", "aria-labelledby"} & set(svg)
        assert named or svg.get("aria-hidden") == "true"
    assert len(page.tags("h1")) == 1
    assert page.tags("html") == [{"lang": "en"}]
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def in_browser(tmp_path: Path, html: str, width: int, script: str) -> str:
    """Evaluate a JavaScript expression over the page's `window` in a frame of that width."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium here")
    outer = tmp_path / "frame.html"
    # In a frame: a window of chromium is at least 500 pixels wide, and the page itself runs no script.
    outer.write_text(
        f'<iframe style="width: {width}px; height: 800px; border: 0" srcdoc="{escape(html)}"></iframe>'
        f"<script>onload = () => {{ const page = frames[0]; document.title = {script} }}</script>"
    )
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", outer.as_uri()], capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    return title.group(1)


@pytest.mark.usefixtures("with_plots")
@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_page_does_not_scroll_sideways_but_wide_tables_do(tmp_path: Path, width: int) -> None:
    labels = {0: "disappointed_and_tired", 1: "cautiously_optimistic", 2: "surprised_and_amused"}
    report(tmp_path, run_record(labels, rows=30), texts_of(labels, ["a sentence about film"] * 10))
    html = (tmp_path / "report.html").read_text()
    over = "(e => e.scrollWidth - e.clientWidth)"
    assert in_browser(tmp_path, html, width, f"{over}(page.document.documentElement)") == "0"
    tables = f"[...page.document.querySelectorAll('.scroll')].filter(e => {over}(e) > 0).length"
    assert (int(in_browser(tmp_path, html, width, tables)) > 0) == (width < 1280)
    svg = "[...page.document.querySelectorAll('figure svg')].filter(e => e.getBoundingClientRect().width > 200)"
    assert in_browser(tmp_path, html, width, f"{svg}.length") == "9"


@pytest.mark.parametrize(
    ("privacy", "words"), [({"epsilon": None}, "NO GUARANTEE"), ({"unsafe_noise_seed": 3}, "UNSAFE")]
)
def test_banner_says_when_nothing_is_guaranteed(
    tmp_path: Path, texts: pd.DataFrame, privacy: dict[str, Any], words: str
) -> None:
    run = run_record(SENTIMENT, rows=20, **privacy)
    page = report(tmp_path, run, texts)
    assert words in page.words[: page.words.index("model model-9m")]
    assert run.guarantee.sentence in page.words


def test_private_run_has_no_alarm(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    words = report(tmp_path, private_run, texts).words
    assert "UNSAFE" not in words
    assert "NO GUARANTEE" not in words


def test_audit_without_a_claim_or_with_too_few_records_is_shown_as_such(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    run = with_figures(private_run, "mia_audit", power=None, detectable_advantage=None, test_records=2)
    words = report(tmp_path, run, texts).words
    assert "(2 members and 2 non-members; detectable with 80% power: none)" in words
    assert "largest advantage under the guarantee no guarantee" in words


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("finetune_eval", "accuracy_before"),
        ("finetune_eval", "accuracy_synthetic"),
        ("finetune_eval", "accuracy_real_std"),
        ("finetune_eval", "learning_rate_real"),
        ("finetune_eval", "steps_real"),
        ("category_balance", "kept_by_label"),
        ("label_filter", "kept"),
        ("mia_audit", "advantage"),
        ("mia_audit", "detectable_advantage"),
    ],
)
def test_missing_figure_is_an_error_that_names_it(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame, stage: str, name: str
) -> None:
    with pytest.raises(KeyError, match=name):
        report(tmp_path, with_figures(private_run, stage, drop=(name,)), texts)
    assert not list(tmp_path.iterdir())


def test_additional_figures_are_shown(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    run = with_figures(private_run, "target_gradient", expected_cosine=0.1234567)
    words = report(tmp_path, run, texts).words
    assert "expected cosine 0.1235" in words


def test_classes_have_scores_and_a_confusion_matrix(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    """At accuracies of 0.71, 0.72 and 0.73, the first half of the right answers is negative."""
    words = report(tmp_path, private_run, texts).words
    section = words[words.index("Class by class") : words.index("Membership-inference audit")]
    assert re.findall("The model [a-z- ]+ Test rows", section) == [
        f"The model {each} Test rows"
        for each in ("before fine-tuning", "fine-tuned on synthetic texts", "fine-tuned on real texts")
    ]
    synthetic = section[section.index("fine-tuned on synthetic") : section.index("fine-tuned on real")]
    assert "true class answer negative answer positive" in synthetic
    assert "negative 1,080 120 positive 720 1,080" in synthetic
    assert "summed over 3 seeds" in synthetic
    assert "negative 400 60.0 ± 0.8% 90.0 ± 1.3% 72.0 ± 1.0%" in synthetic
    assert "positive 600 90.0 ± 1.3% 60.0 ± 0.8% 72.0 ± 1.0%" in synthetic
    assert "mean of the classes 1,000 75.0" in synthetic


def test_synthetic_and_real_texts_are_compared_without_a_word_of_the_real_ones(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    page = report(tmp_path, private_run, texts)
    compared = compared_with(texts)
    assert (
        "figure synthetic real texts 5 5 words per text, median and quartiles 5 (5 to 5) 7 (7 to 7)" in page.words
    )
    for name, synthetic, real in resemblance_rows(compared):
        assert f"{name} {synthetic} {real}" in page.words
    assert (
        f"words that the other side has too {compared.synthetic.shared:.1%} {compared.real.shared:.1%}"
        in page.words
    )
    assert f"hold {sum(compared.explained):.1%} of the variance" in page.words
    html = (tmp_path / "report.html").read_text()
    assert not [word for word in ("clerk", "ledgers", "Aldermoor") if word in html]


def test_no_texts_are_compared_with_no_texts(tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame) -> None:
    path = tmp_path / "report.html"
    nothing = resemblance([], [], seed=0)
    rows = ReportRows(generated_rows(), texts, finetune_rows(), audit_rows(), nothing)
    write_report(path, private_run, rows)
    assert "words per text, median and quartiles none none" in Page(path.read_text()).words


def test_one_seed_and_a_diverged_arm_have_no_spread_and_no_table(texts: pd.DataFrame) -> None:
    rows = finetune_rows(seeds=1)
    before, synthetic, real = class_tables(rows, {1: "positive", 0: "negative"})
    assert (before.arm, synthetic.arm, real.arm) == ("before", "synthetic", "real")
    assert synthetic.answers == ["negative", "positive"]
    assert synthetic.confusion == [("negative", [355, 45]), ("positive", [245, 355])]
    assert synthetic.scores[0] == ("negative", 400, "59.2%", "88.8%", "71.0%")
    diverged = rows.copy()
    diverged.loc[rows["arm"] == "real", CONFUSION] = None
    assert [each.arm for each in class_tables(diverged, SENTIMENT)] == ["before", "synthetic"]


@pytest.mark.usefixtures("with_plots")
def test_other_arms_are_shown_beside_synthetic_and_real(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    figures = private_run.stage("finetune_eval").figures
    more = {k.replace("_real", "_rerank"): v for k, v in figures.items() if "_real" in k}
    rows = finetune_rows()
    rows = pd.concat([rows, rows[rows["arm"] == "real"].assign(arm="rerank")])
    path = tmp_path / "report.html"
    run = with_figures(private_run, "finetune_eval", **more)
    rows = ReportRows(generated_rows(), texts, rows, audit_rows(), compared_with(texts))
    write_report(path, run, rows)
    page = Page(path.read_text())
    assert "rerank texts 73.8 ± 1.0%" in page.words
    assert "on rerank texts 74.0% after 200 steps" in str(page.tags("svg")[5]["aria-label"])


def test_a_comparison_is_shown_and_else_how_to_make_one(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    assert "run gradmm compare with these settings" in report(tmp_path, private_run, texts).words
    table = pd.DataFrame(
        {
            "arm": ["before", "<b>rerank</b>", "gradmm"],
            "size": [0, 20, 20],
            "seeds": [1, 3, 3],
            "accuracy": [0.6, 0.702, 0.75],
            "accuracy_half_width": [None, 0.011, 0.0123],
            "gap_recovered": [0.0, 0.34, 0.5],
        }
    )
    path = tmp_path / "compared.html"
    rows = ReportRows(generated_rows(), texts, finetune_rows(), audit_rows(), compared_with(texts))
    write_report(path, private_run, rows, comparison=Comparison("20260103-reviews-compare", table))
    page = Page(path.read_text())
    assert "in the comparison 20260103-reviews-compare of these settings" in page.words
    assert "before – 60.0% 0% 1 <b>rerank</b> 20 70.2 ± 1.1% 34% 3 gradmm 20 75.0 ± 1.2% 50% 3" in page.words
    assert "run gradmm compare" not in page.words


@pytest.mark.usefixtures("with_plots")
def test_report_is_for_its_owner_only_and_the_same_each_time(
    tmp_path: Path, private_run: RunRecord, texts: pd.DataFrame
) -> None:
    report(tmp_path, private_run, texts)
    path = tmp_path / "report.html"
    first = path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    report(tmp_path, private_run, texts)
    assert path.read_bytes() == first


def test_without_losses_the_first_texts_are_of_each_class_in_turn(texts: pd.DataFrame) -> None:
    first, worst = best_and_worst(texts.assign(matching_loss=float("nan")))
    assert first["id"].tolist() == [f"{label}-{number:05d}" for number in range(5) for label in (0, 1)]
    assert worst.empty
