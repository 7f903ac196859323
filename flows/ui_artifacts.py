"""Shows runs in Prefect's UI: a page for each stage, tables of texts, progress, and a page for the run.

Published from the flow, on every run: a cache hit skips a task's body, and what it would have published with it.
Keys stay the same over runs, so that the UI shows each artifact's history. Nothing here can fail a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.ui_pages import TEXT_COLUMNS, Page, refusal_page, run_page, sample_rows, stage_page
from gradmm_core.artifacts import Root, publish
from gradmm_core.filters import kept_texts
from gradmm_core.recipe import Recipe
from gradmm_core.report import duration
from gradmm_core.run_record import RunRecord, StageRecord

logger = logging.getLogger("gradmm_core.flow")

#: Seconds between two updates of a progress artifact.
PROGRESS_INTERVAL = 2.0


@contextmanager
def never_failing(what: str) -> Iterator[None]:
    """Turns whatever goes wrong into a warning: a run does not depend on how it is shown."""
    try:
        yield
    except Exception as error:
        logger.warning("the UI will not show %s (%s: %s)", what, type(error).__name__, error)


def artifact_key(*words: str) -> str:
    """A key as Prefect wants it: names of recipes and stages have small letters, digits, `-`, and `_` besides."""
    return "-".join(words).replace("_", "-")


def plot_key(recipe: Recipe, records: Sequence[StageRecord]) -> str:
    """The digest of all that decides what is drawn: the rows, their recipe, and the code."""
    parts = [_code_digest(), recipe.model_dump(mode="json"), [(each.stage, each.sha256) for each in records]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for module in ("flows.ui_plots", "gradmm_core.plots"):
        spec = find_spec(module)  # found, not imported
        assert spec is not None
        digest.update(Path(str(spec.origin)).read_bytes())
    return digest.hexdigest()


@dataclass
class UiArtifacts:
    """The artifacts of one run."""

    recipe: Recipe
    root: Root
    pages: dict[str, UUID] = field(default_factory=dict)

    def show_stage(self, records: Sequence[StageRecord]) -> None:
        """Publishes the page of the last stage of a run so far, and a table of the texts that were generated."""
        record = records[-1]
        plot = ""
        with never_failing(f"a plot of {record.stage}"):
            plot = self._plot(records)
        with never_failing(record.stage):
            self.pages[record.stage] = self._publish(stage_page(record, self.recipe, plot), record.stage)
        if record.stage == "generation":
            with never_failing("the generated texts"):
                create_table_artifact(
                    sample_rows(record.read(TEXT_COLUMNS)),
                    key=artifact_key(self.recipe.name, "generation-texts"),
                    description=f"Some of the {record.rows} texts, before any filter",
                )

    def show_run(self, run: RunRecord) -> None:
        """Publishes the page of a finished run, and a table of its best texts."""
        with never_failing("the run's result"):
            rows = run.stage("category_balance").read([*TEXT_COLUMNS, "kept", "reason"])
            texts = kept_texts(rows)
            create_table_artifact(
                sample_rows(texts.sort_values(["matching_loss", "id"])),
                key=artifact_key(self.recipe.name, "texts"),
                description=f"The best of the {len(texts)} texts of the release",
            )
            # An artifact's page has its id for an address: of its siblings' the last part is another one, under
            # whatever address a browser has come to the UI.
            links = {stage: str(page) for stage, page in self.pages.items()}
            self._publish(run_page(run, self.root.runs / run.run_id, texts, links), "result")

    def show_refusal(self, refusal: Exception) -> None:
        """Publishes why the privacy budget does not allow a run."""
        with never_failing("the refusal"):
            self._publish(refusal_page(self.recipe, refusal), "budget-exhausted")

    def progress(self, stage: str, parts: int) -> Progress:
        """A progress artifact for a stage of so many shards."""
        return Progress(artifact_key(self.recipe.name, stage, "progress"), stage, parts)

    def _plot(self, records: Sequence[StageRecord]) -> str:
        """The plot of a stage's page, drawn once and kept: a cached run would spend most of its time on plots."""
        file = self.root.path / "plots" / f"{plot_key(self.recipe, records)}.md"
        if not file.is_file():
            from flows.ui_plots import plot_markdown  # late: it imports matplotlib

            publish(file, plot_markdown(self.recipe, records).encode())
        return file.read_text()

    def _publish(self, page: Page, name: str) -> UUID:
        return create_markdown_artifact(
            page.markdown, key=artifact_key(self.recipe.name, name), description=page.summary
        )  # pyright: ignore[reportReturnType]


@dataclass
class Progress:
    """How far a sharded stage has come: told at the start, at the end, and every so often."""

    key: str
    stage: str
    parts: int
    done: int = 0
    rows: int = 0
    made: int = 0
    artifact: UUID | None = None
    started: float = field(default_factory=lambda: time.monotonic())
    told: float | None = None

    def add(self, rows: int, cached: bool) -> None:
        """One more shard is there."""
        self.done += 1
        self.rows += rows
        self.made += not cached

    def tell(self) -> None:
        now = time.monotonic()
        if self.done < self.parts and self.told is not None and now - self.told < PROGRESS_INTERVAL:
            return
        self.told = now
        percentage = 100.0 * self.done / self.parts if self.parts else 100.0
        words = self._words(now - self.started)
        logger.info("%s: %s", self.stage, words)
        with never_failing(f"the progress of {self.stage}"):
            if self.artifact is None:
                self.artifact = create_progress_artifact(percentage, key=self.key, description=words)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                update_progress_artifact(self.artifact, percentage, description=words)

    def _words(self, seconds: float) -> str:
        words = f"{self.done} of {self.parts} shards, {self.rows} rows"
        left = self.parts - self.done
        if self.made and left:
            words += f", about {duration(left * seconds / self.made)} left"
        return words
