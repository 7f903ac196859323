"""What a person sees: artifacts in Prefect's own UI, both versions of it, in a browser without a window."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gradmm.config.recipe import Recipe
from gradmm.flows.ui.markdown import inert, table
from gradmm.flows.ui.pages import stage_page
from gradmm.flows.ui.plots import plot_markdown
from gradmm.outputs.record import StageRecord
from gradmm.privacy.release_plan import release_plan
from tests.conftest import prefect_home
from tests.e2e.browser import browse, eventually, needs_chromium, pixels_of_plots
from tests.flows.test_ui_artifacts import HOSTILE_TEXTS, text_rows

pytestmark = [pytest.mark.slow, needs_chromium]

#: Where the UI's versions live.
UIS = ("", "/v2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path) -> Iterator[str]:
    """The address of a Prefect server of its own: the tests' other one does not know its own for its UI."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    home = tmp_path_factory.mktemp("server") / "home"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        **prefect_home(home, migrated_database),
        "PREFECT_API_URL": f"{address}/api",
        "PREFECT_UI_API_URL": f"{address}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    port = address.rpartition(":")[2]
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=home, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not _healthy(address):
            assert process.poll() is None, (home / "server.log").read_text()
            assert time.monotonic() < deadline, (home / "server.log").read_text()
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/api/health", timeout=2).is_success
    except httpx.TransportError:
        return False


def published(server: str, kind: str, data: Any) -> str:
    """The path of a new artifact's page."""
    created = httpx.post(f"{server}/api/artifacts/", json={"key": "shown", "type": kind, "data": data})
    return f"/artifacts/artifact/{created.raise_for_status().json()['id']}"


@pytest.mark.parametrize("ui", UIS)
def test_a_stages_plot_has_pixels(
    server: str, ui: str, tmp_path: Path, tiny_recipe: Callable[..., Recipe]
) -> None:
    file = tmp_path / "rows.parquet"
    rows = text_rows(["a text", "another"])
    rows["loss_history"] = [[0.4, 0.2, 0.1], [0.5, 0.3, 0.2]]
    rows.to_parquet(file)
    record = StageRecord(
        stage="generation",
        path=file,
        sha256="0" * 64,
        rows=2,
        figures={
            "mean_matching_loss": 0.15,
            "mean_log_perplexity": 1.5,
            "token_passes_per_text": 60.0,
            "target_shrinkage": {"0": None, "1": None},
        },
        cached=False,
        seconds=1.0,
    )
    recipe = tiny_recipe()
    page = stage_page(record, recipe, plot_markdown(recipe, release_plan(recipe), [record]))
    path = published(server, "markdown", page.markdown)
    assert eventually(lambda: pixels_of_plots(f"{server}{ui}{path}", tmp_path) > 500)


@pytest.mark.parametrize("ui", UIS)
@pytest.mark.parametrize("kind", ["markdown", "table"])
def test_hostile_texts_are_texts(server: str, ui: str, kind: str, tmp_path: Path) -> None:
    texts = [*HOSTILE_TEXTS, "the last one"]
    data = (
        table(["text"], [(text,) for text in texts])
        if kind == "markdown"
        else [{"text": inert(text)} for text in texts]
    )
    path = published(server, kind, data if kind == "markdown" else json.dumps(data))

    def shown() -> str | None:
        page = browse(f"{server}{ui}{path}", tmp_path, "--dump-dom")
        body = re.search(r"<table.*?</table>", page, re.DOTALL)
        return body.group() if body and "alert(1)" in body.group() else None

    html = eventually(shown)
    assert html, "the texts are not there"
    forbidden = {
        "script",
        "img",
        "a",
        "b",
        "i",
        "em",
        "strong",
        "del",
        "code",
        "pre",
        "h1",
        "li",
        "blockquote",
        "hr",
    }
    assert not forbidden & set(re.findall(r"<(\w+)", html))
