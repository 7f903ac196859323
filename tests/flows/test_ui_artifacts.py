"""The display of a run in Prefect's UI: artifacts on every run, inert for any text, and never a failed run."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import httpx
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from prefect import flow
from prefect.artifacts import TableArtifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.logging.handlers import APILogHandler, APILogWorker

from gradmm.config.recipe import Recipe
from gradmm.deployments.serving.local_run import progress_on_stderr
from gradmm.errors import BudgetExhausted
from gradmm.filters.rows import filter_figures
from gradmm.flows.runtime.ui_logs import logs_in_ui
from gradmm.flows.ui import artifacts as ui_artifacts
from gradmm.flows.ui import plots as ui_plots
from gradmm.flows.ui.artifacts import UiArtifacts, artifact_key, plot_key, plotting_sources
from gradmm.flows.ui.markdown import NO_BREAK_SPACE_WITHOUT_WIDTH, WORD_JOINER, escaped, inert, table
from gradmm.flows.ui.pages import TABLE_ROWS, sample_rows, stage_page
from gradmm.outputs import plot_style
from gradmm.outputs.descriptions import STAGES
from gradmm.outputs.glossary import GLOSSARY, entry
from gradmm.outputs.grades import one_line
from gradmm.outputs.record import RunRecord, StageRecord
from gradmm.outputs.report import shown_terms
from gradmm.privacy.release_plan import release_plan
from gradmm.storage.artifacts import Root
from gradmm.target import preflight
from gradmm.tasks.runtime.registry import RUN_STAGES, STAGE_VERSIONS
from tests.conftest import examples
from tests.flows.conftest import STAGES_OF_THE_PAPER
from tests.flows.test_distil import run
from tests.unit.outputs.test_release import HOSTILE

PRIVATE = {
    "privacy": {"epsilon": 1.0, "delta": 1e-5, "declared_records": 40},
    "target_gradient": {"space": "label-rows"},
}


@pytest.fixture(scope="module", autouse=True)
def without_plots() -> None:
    """Draw plots, unlike in other modules."""


@pytest.fixture(scope="module", autouse=True)
def without_pages() -> None:
    """Publish pages, unlike in other modules."""


def latest_run() -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]


def flow_runs_of(recipe: str) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        return [each for each in client.read_flow_runs(limit=200) if each.parameters.get("name") == recipe]


def artifacts_of(flow_run: FlowRun) -> dict[str, Artifact]:
    """Return a run's artifacts by key; each key is unique."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        )
    assert len({each.key for each in found}) == len(found)
    return {str(each.key): each for each in found}


def markdown_of(artifact: Artifact) -> str:
    assert isinstance(artifact.data, str)
    return artifact.data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[RunRecord, dict[str, Artifact]]]:
    return {}


@pytest.fixture
def twice(
    root: Path, seen: dict[str, tuple[RunRecord, dict[str, Artifact]]], tiny_recipe: Callable[..., Recipe]
) -> tuple[tuple[RunRecord, dict[str, Artifact]], tuple[RunRecord, dict[str, Artifact]]]:
    """Return a private run and its artifacts, and those of a second run with all stages cached."""
    if not seen:
        for name in ("first", "second"):
            record = run(tiny_recipe(**PRIVATE), root)
            seen[name] = (record, artifacts_of(latest_run()))
    return seen["first"], seen["second"]


def test_every_stage_has_its_page_on_a_first_and_on_a_cached_run(twice: tuple) -> None:
    for (record, artifacts), cached in zip(twice, (False, True), strict=True):
        made = [stage.stage for stage in record.stages if not stage.cached]
        assert made == (["mechanism_audit"] if cached else [stage.stage for stage in record.stages])
        assert len(record.stages) == 11
        stages = {artifact_key("tiny", stage.stage) for stage in record.stages}
        others = {"tiny-result", "tiny-texts", "tiny-generation-texts"}
        progress = {"tiny-generation-progress", "tiny-finetune-eval-progress"}
        assert set(artifacts) == stages | others | progress
        for stage in record.stages:
            page = artifacts[artifact_key("tiny", stage.stage)]
            assert page.type == "markdown"
            assert page.description
            assert f"pd.read_parquet({str(stage.path)!r})" in page.data
            assert stage.sha256 in page.data
            assert ("Found in the cache" in page.data) is (stage.stage not in made)
            assert ("Computed in " in page.data) is (stage.stage in made)


def test_a_flow_run_is_named_by_its_recipe_and_the_time(twice: tuple) -> None:
    names = [each.name for each in flow_runs_of("tiny")]
    assert len(names) >= 2
    started = {f"tiny {record.started:%Y-%m-%d %H:%M}" for record, _ in twice}
    soon = {f"tiny {record.started - timedelta(minutes=1):%Y-%m-%d %H:%M}" for record, _ in twice}
    assert all(re.fullmatch(r"tiny \d{4}-\d\d-\d\d \d\d:\d\d", name) for name in names)
    assert set(names) & (started | soon)  # the name is given some seconds before the run starts


def test_the_glossary_has_every_figure_of_the_stages(twice: tuple) -> None:
    record, _ = twice[0]
    assert {entry(term) for term in shown_terms(record)} <= set(GLOSSARY)


def test_a_line_to_paste_reads_the_rows(twice: tuple) -> None:
    record, artifacts = twice[0]
    for stage in record.stages:
        (line,) = re.findall(r"```python\n(.*)\n```", artifacts[artifact_key("tiny", stage.stage)].data)
        rows = eval(line, {"pd": pd})
        assert len(rows) == stage.figures.get("kept", stage.rows)


def test_plots_are_pictures(twice: tuple) -> None:
    for record, artifacts in twice:
        drawn = {}
        for stage in record.stages:
            for encoded in re.findall(
                r"!\[[^\n]*\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)",
                artifacts[artifact_key("tiny", stage.stage)].data,
            ):
                content = base64.b64decode(encoded, validate=True)
                assert content.startswith(b"\x89PNG\r\n\x1a\n")
                drawn[stage.stage] = struct.unpack(">II", content[16:24])
        assert set(drawn) == set(STAGES_OF_THE_PAPER)
        assert all(width >= 600 and height >= 200 for width, height in drawn.values())


def test_every_stage_has_a_purpose() -> None:
    assert set(STAGES) == set(STAGE_VERSIONS) - {"generation_shard"}  # shards have no page
    run_stages = [stage for stage in RUN_STAGES if stage not in ("generation_shard", "arm_eval")]
    assert list(STAGES)[: len(run_stages)] == run_stages


def test_pages_have_results_and_figures(twice: tuple) -> None:
    record, artifacts = twice[1]
    evaluation = record.stage("finetune_eval").figures
    assert f"{100 * evaluation['accuracy_before']:.1f}%" in artifacts["tiny-finetune-eval"].description
    assert "8 texts, matching loss" in artifacts["tiny-generation"].description
    assert "6 of 8 texts left" in artifacts["tiny-loss-selection"].description
    assert "(3 bad, 3 good)" in artifacts["tiny-loss-selection"].description
    selected = pd.read_parquet(record.stage("loss_selection").path)
    dropped = selected[~selected["kept"]]
    assert len(dropped) == 2
    for text, reason in zip(dropped["text"], dropped["reason"], strict=True):
        assert f", {escaped(reason)}): {escaped(text)}" in artifacts["tiny-loss-selection"].data
    assert "noise sigma" in artifacts["tiny-target-gradient"].description
    assert "expected" in artifacts["tiny-target-gradient"].data  # the plot's words


def test_the_last_page_has_the_verdict_the_guarantee_texts_and_links(twice: tuple, root: Path) -> None:
    record, artifacts = twice[1]
    page = artifacts["tiny-result"].data
    html = rendered(page)
    assert "NO GUARANTEE" not in page
    assert escaped(record.guarantee.sentence) in page
    assert page.splitlines()[2] == f"**{escaped(one_line(record))}**"
    texts = pd.read_parquet(record.stage("labelling").path).sort_values("matching_loss")
    first = page.index("best texts")
    assert page.index(escaped(texts["text"].iloc[0]), first) < page.index("## Stages")
    for stage in record.stages:
        linked = artifacts[artifact_key("tiny", stage.stage)]
        assert f'<a href="{linked.id}">{stage.stage.replace("_", " ")}</a>' in html
    assert str(root / "runs" / record.run_id / "release") in page.replace("\\", "")


def test_tables_have_the_texts_of_all_classes_in_turn(twice: tuple) -> None:
    record, artifacts = twice[1]
    rows = json.loads(artifacts["tiny-generation-texts"].data)
    assert [row["class"] for row in rows] == ["bad", "good"] * 4
    texts = pd.read_parquet(record.stage("generation").path)["text"]
    assert {row["text"] for row in rows} == {inert(text) for text in texts}
    assert len(json.loads(artifacts["tiny-texts"].data)) == record.stage("labelling").rows


def test_no_private_text_is_shown(twice: tuple, tiny_data: Path) -> None:
    _, artifacts = twice[0]
    shown = "".join(str(each.data) + str(each.description) for each in artifacts.values())
    for split in ("train", "validation", "test"):
        for text in pd.read_parquet(tiny_data / f"{split}.parquet")["text"]:
            assert text not in shown


def test_progress_ends_at_the_whole(twice: tuple) -> None:
    for _, artifacts in twice:
        progress = artifacts["tiny-generation-progress"]
        assert progress.type == "progress"
        assert progress.data == 100.0
        assert progress.description == "4 of 4 shards, 8 rows"


def test_keys_are_legal_and_the_same_over_runs(twice: tuple) -> None:
    (_, first), (_, second) = twice
    assert set(first) == set(second)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in first)
    assert artifact_key("tweet_emotions_six", "mia_audit") == "tweet-emotions-six-mia-audit"


def test_a_run_without_an_epsilon_says_so(tmp_path: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    run(tiny_recipe(), tmp_path)
    artifacts = artifacts_of(latest_run())
    assert "NO GUARANTEE" in str(artifacts["tiny-result"].description)
    assert "No privacy guarantee" in markdown_of(artifacts["tiny-result"])
    # Without noise there is nothing to compare.
    assert "data:image" not in markdown_of(artifacts["tiny-target-gradient"])


def test_a_refused_run_says_why(twice: tuple, root: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    another = PRIVATE | {"target_gradient": {"space": "full"}}
    with pytest.raises(BudgetExhausted) as refused:
        run(tiny_recipe(**another), root)
    page = markdown_of(artifacts_of(latest_run())["tiny-budget-exhausted"])
    assert escaped(str(refused.value)) in page
    assert "gradmm privacy" in page


# ----------------------------------------------------------------------------------------------- hostile texts

HOSTILE_TEXTS = [
    *HOSTILE,
    "[a](javascript:alert(1)) ![b](data:text/html;base64,AAAA) <a href='data:text/html,x'>c</a>",
    "`code` ``co`de`` ~~no~~ **bo_ld** __x__ $x$ \\| \\` &lt;i&gt; &#60;b&#62;",
    "line\nbreak\r\n\r\n| x | y |\n|---|---|\n| 1 | 2 |",
    "# heading",
    "- item",
    "1. item",
    "> quotation",
    "    indented",
    "```python",
    "a@evil.example mailto:b@evil.example www.evil.example ftp://evil.example",
    "right\u202eto left \x1b[31mred \x00",
    "|",
    "\\",
    "",
]

#: With raw HTML enabled. Unlike the UI's renderer, it does not treat U+FEFF as white space: see the browser test.
EMPHASIS = ("em", "strong", "s")
CELLS = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def rendered(markdown: str) -> str:
    return CELLS.render(markdown)


def test_hostile_texts_are_shown_as_text() -> None:
    html = rendered(table(["text", "class"], [(text, "a|b") for text in HOSTILE_TEXTS]))
    assert html.count("<tr>") == 1 + len(HOSTILE_TEXTS)
    assert html.count("<td>") == 2 * len(HOSTILE_TEXTS)
    assert set(re.findall(r"<(\w+)", html)) == {"table", "thead", "tbody", "tr", "th", "td"}


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@examples(300)
def test_any_text_stays_in_its_cell(text: str) -> None:
    html = rendered(table(["text", "next"], [(text, "next")]))
    assert set(re.findall(r"<(\w+)", html)) == {"table", "thead", "tbody", "tr", "th", "td"}
    assert html.count("<td>") == 2


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@examples(300)
def test_a_table_of_the_ui_shows_any_text_by_itself(text: str) -> None:
    """The UI's first version renders each cell as a document."""
    html = rendered(inert(text))
    assert set(re.findall(r"<(\w+)", html)) <= {"p", *EMPHASIS}


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_hostile_text_is_inert_in_a_table_of_the_ui(text: str) -> None:
    shown = inert(text)
    assert "\n" not in shown
    html = rendered(shown)
    assert set(re.findall(r"<(\w+)", html)) <= {"p", *EMPHASIS}
    bare = shown.replace(WORD_JOINER, "").replace(NO_BREAK_SPACE_WITHOUT_WIDTH, "")
    expected = " ".join(text.split()).replace("`", "\u02cb")
    assert bare == expected or "\\u" in bare


def test_harmless_texts_are_shown_as_they_are() -> None:
    for text in (
        "It's great, isn't it? (Yes!)",
        "Such cold waffles and such late doors, it is worth every penny.",
    ):
        assert inert(text) == text
        assert rendered(escaped(text)) == rendered(text)


def text_rows(texts: list[str], losses: list[float] | None = None) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": [f"0-{number:05d}" for number in range(len(texts))],
            "text": texts,
            "label": [number % 2 for number in range(len(texts))],
            "label_name": [("<b>bad</b>", "good")[number % 2] for number in range(len(texts))],
            "matching_loss": losses or [0.1 * number for number in range(len(texts))],
            "log_perplexity": 1.5,
        }
    )


def test_a_page_of_hostile_texts_is_a_page_of_texts(tmp_path: Path, tiny_recipe: Callable[..., Recipe]) -> None:
    names = {"0": "<b>|bad|</b>", "1": "[good](javascript:alert(1))"}
    classes = [c.model_dump() | {"name": names[str(c.label)]} for c in tiny_recipe().classes]
    file = tmp_path / "a `b` | c.parquet"
    rows = text_rows(HOSTILE_TEXTS).assign(kept=[n % 3 > 0 for n in range(len(HOSTILE_TEXTS))], reason="a | b")
    rows.to_parquet(file)
    record = StageRecord(
        stage="label_filter",
        path=file,
        sha256="0" * 64,
        rows=len(rows),
        figures={
            "kept": 3,
            "kept_by_label": {"0": 1, "1": 2},
            "mean_matching_loss": 0.1,
            "mean_log_perplexity": 1.5,
        },
        cached=True,
        seconds=0.1,
    )
    page = stage_page(record, tiny_recipe(classes=classes))
    html = rendered(page.markdown)
    assert set(re.findall(r"<(\w+)", html)) == {
        *("h1", "h2", "p", "strong", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "ul", "li")
    }
    assert set(re.findall(r"<(\w+)", rendered(page.summary))) == {"p"}


def test_a_filter_that_drops_all_texts_has_a_page_that_says_why(
    tmp_path: Path, tiny_recipe: Callable[..., Recipe]
) -> None:
    rows = text_rows(["one", "two"]).assign(kept=False, reason="classified as another label")
    rows.to_parquet(tmp_path / "rows.parquet")
    record = StageRecord(
        stage="label_filter",
        path=tmp_path / "rows.parquet",
        sha256="0" * 64,
        rows=len(rows),
        figures=filter_figures(rows),
        cached=False,
        seconds=0.1,
    )
    page = stage_page(record, tiny_recipe())
    assert page.summary.startswith("0 of 2 texts left")
    assert "Sample of the texts left" not in page.markdown
    assert page.markdown.count("classified as another label") == 2


def test_samples_are_json_and_no_more_than_fifty() -> None:
    rows = sample_rows(text_rows(["a text"] * 120, [float("nan")] + [0.123456789] * 119))
    assert len(rows) == TABLE_ROWS == 50
    assert rows[0]["matching loss"] is None
    assert rows[1]["matching loss"] == 0.1235
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert {type(value) for row in rows for value in row.values()} == {str, float, type(None)}
    assert TableArtifact(table=rows, key="x").format() == json.dumps(rows)


# ------------------------------------------------------------------------------------------------------ failures


def test_an_api_that_refuses_artifacts_does_not_fail_the_run(
    twice: tuple,
    root: Path,
    tiny_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise httpx.HTTPStatusError(
            "413 too large", request=httpx.Request("POST", "/"), response=httpx.Response(413)
        )

    for method in ("create_artifact", "update_artifact"):
        monkeypatch.setattr(SyncPrefectClient, method, refuse)
    with caplog.at_level(logging.WARNING, "gradmm.flow"):
        record = run(tiny_recipe(**PRIVATE), root)
    assert record.unchanged
    assert (root / "runs" / record.run_id / "run.json").exists()
    warned = [each.message for each in caplog.records if "the UI will not show" in each.message]
    assert any("finetune_eval (HTTPStatusError: 413 too large)" in message for message in warned)
    assert artifacts_of(latest_run()) == {}


def cannot_draw(*arguments: object) -> str:
    raise ValueError("nothing to draw")


def test_plots_are_drawn_once(
    twice: tuple, root: Path, tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ui_plots, "plot_markdown", cannot_draw)
    run(tiny_recipe(**PRIVATE), root)
    _, before = twice[1]
    assert artifacts_of(latest_run())["tiny-generation"].data == before["tiny-generation"].data


def test_another_plot_is_drawn_for_other_rows(twice: tuple, tiny_recipe: Callable[..., Recipe]) -> None:
    record, _ = twice[0]
    key = plot_key(tiny_recipe(), record.stages)
    assert key == plot_key(tiny_recipe(), record.stages)
    changed = [*record.stages[:-1], record.stages[-1].model_copy(update={"sha256": "0" * 64})]
    assert key not in {plot_key(tiny_recipe(), changed), plot_key(tiny_recipe(**PRIVATE), record.stages)}


def test_a_plots_digest_covers_every_module_that_draws_it() -> None:
    code = (
        "import sys, gradmm.flows.ui.plots;"
        "print(*(module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'gradmm'))"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = {Path(file) for file in imported.split()}
    assert {Path(str(ui_plots.__file__)), Path(str(plot_style.__file__)), Path(str(preflight.__file__))} <= modules
    assert {module for module in modules if module.name != "__init__.py"} <= set(plotting_sources())


def test_a_plot_that_cannot_be_drawn_costs_the_plot_only(
    twice: tuple,
    root: Path,
    tiny_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ui_plots, "plot_markdown", cannot_draw)
    shutil.rmtree(root / "plots")
    record = run(tiny_recipe(**PRIVATE), root)
    page = markdown_of(artifacts_of(latest_run())["tiny-generation"])
    assert "data:image" not in page
    assert record.stage("generation").sha256 in page


def test_progress_is_told_every_so_often(
    tiny_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[tuple[float, str]] = []
    now = 100.0

    def create(progress: float, key: str, description: str) -> UUID:
        told.append((progress, description))
        return UUID(int=1)

    def update(artifact: UUID, progress: float, description: str) -> UUID:
        told.append((progress, description))
        return artifact

    monkeypatch.setattr(ui_artifacts, "create_progress_artifact", create)
    monkeypatch.setattr(ui_artifacts, "update_progress_artifact", update)
    monkeypatch.setattr(ui_artifacts.time, "monotonic", lambda: now)
    progress = UiArtifacts(tiny_recipe(), release_plan(tiny_recipe()), Root(path=tmp_path)).progress("generation")
    progress.expect(4)
    progress.tell()
    progress.add(rows=20, cached=True)
    now += 60  # workers start
    for _ in range(3):
        now += 1.5
        progress.add(rows=20, cached=False)
        progress.tell()
    progress.expect(4)
    for _ in range(2):
        now += 1.5
        progress.add(rows=10, cached=False)
        progress.tell()
    assert told == [
        (0.0, "0 of 4 shards, 0 rows"),
        (50.0, "2 of 4 shards, 40 rows"),
        (100.0, "4 of 4 shards, 80 rows"),
        (75.0, "6 of 8 shards, 100 rows, about 3.0 s left"),
    ]


# ---------------------------------------------------------------------------------------------------------- logs


@pytest.fixture
def as_on_import() -> Iterator[logging.Logger]:
    """Configure the core's logger as without Prefect's settings from pyproject.toml."""
    log = logging.getLogger("gradmm")
    level, handlers = log.level, log.handlers[:]
    log.handlers[:] = [each for each in handlers if not isinstance(each, APILogHandler)]
    log.setLevel(logging.NOTSET)
    yield log
    log.handlers[:] = handlers
    log.setLevel(level)


def logs_of(flow_run: FlowRun) -> list[str]:
    APILogWorker.instance().drain()
    with get_client(sync_client=True) as client:
        found = client.read_logs(
            log_filter=LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])), sort=LogSort.TIMESTAMP_ASC
        )
    return [each.message for each in found if each.name.startswith("gradmm")]


@flow(name="logging")
def logging_flow() -> None:
    with logs_in_ui():
        logging.getLogger("gradmm.stage").info("a stage starts")
        logging.getLogger("gradmm.evaluation.finetune_eval").warning("it diverged")
        logging.getLogger("gradmm.stage").debug("not for the UI")
    logging.getLogger("gradmm.stage").info("afterwards")


def test_the_cores_log_reaches_the_ui_once(as_on_import: logging.Logger) -> None:
    logging_flow()
    assert logs_of(latest_run()) == ["a stage starts", "it diverged"]
    as_on_import.addHandler(APILogHandler())  # as Prefect's own setting does
    logging_flow()
    assert logs_of(latest_run()) == ["a stage starts", "it diverged"]


def test_the_command_line_has_each_line_once_and_the_ui_too(as_on_import: logging.Logger) -> None:
    errors = io.StringIO()
    with redirect_stderr(errors), progress_on_stderr():
        logging_flow()
    assert errors.getvalue().count("a stage starts") == 1
    assert logs_of(latest_run()) == ["a stage starts", "it diverged", "afterwards"][:2]


def test_the_flow_logs_to_the_ui(
    twice: tuple, root: Path, tiny_recipe: Callable[..., Recipe], as_on_import: logging.Logger
) -> None:
    run(tiny_recipe(**PRIVATE), root)
    logged = logs_of(latest_run())
    assert [line for line in logged if line.startswith("finetune_eval")] == [
        "finetune_eval: 0 of 3 shards, 0 rows",
        "finetune_eval: 3 of 3 shards, 10 rows",
        "finetune_eval: 10 rows, cached",
    ]
    assert as_on_import.level == logging.NOTSET
    assert not any(isinstance(each, APILogHandler) for each in as_on_import.handlers)
