"""Artifacts in Prefect's UI: a page per stage, tables of texts, progress, and a page for the run.

The flow publishes them, because a cache hit skips a task's body. Keys are the same for every run, so the UI shows
each artifact's history. An error here never fails a run.
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
from importlib.metadata import version
from pathlib import Path
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

import gradmm.flows.ui
from gradmm.config.recipe import Recipe
from gradmm.flows.ui.pages import TEXT_COLUMNS, Page, refusal_page, run_page, sample_rows, stage_page
from gradmm.outputs.formatting import duration
from gradmm.outputs.record import NEVER_CACHED, RunRecord, StageRecord
from gradmm.outputs.report import has_losses
from gradmm.privacy.release_plan import ReleasePlan
from gradmm.storage.artifacts import Root, publish

logger = logging.getLogger("gradmm.flow")

#: Minimum seconds between two updates of a progress artifact.
PROGRESS_INTERVAL = 2.0


@contextmanager
def never_failing(what: str) -> Iterator[None]:
    """Turn any error into a warning: a run does not depend on its display."""
    try:
        yield
    except Exception as error:
        logger.warning("the UI will not show %s (%s: %s)", what, type(error).__name__, error)


def artifact_key(*words: str) -> str:
    """Join words to a key of lower-case letters, digits and dashes, as Prefect requires."""
    return "-".join(words).replace("_", "-")


def plot_key(recipe: Recipe, records: Sequence[StageRecord]) -> str:
    """Digest everything that decides the plot: the stages, the recipe and the code.

    Stages that are never cached have no plot, and no plot shows them.
    """
    stages = [(each.stage, each.sha256) for each in records if each.stage not in NEVER_CACHED]
    parts = [_code_digest(), recipe.model_dump(mode="json"), stages]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    digest = hashlib.sha256(version("matplotlib").encode())
    for file in plotting_sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def plotting_sources() -> list[Path]:
    """Return all modules of the core and of this package: reading them takes less time than following imports."""
    folders = [*gradmm.__path__, *gradmm.flows.ui.__path__]
    return sorted({file for folder in folders for file in Path(folder).rglob("*.py")})


@dataclass
class UiArtifacts:
    """The artifacts of one run."""

    recipe: Recipe
    plan: ReleasePlan
    root: Root
    pages: dict[str, UUID] = field(default_factory=dict)

    def show_stage(self, records: Sequence[StageRecord]) -> None:
        """Publish the page of the last of the stages so far and, after generation, a table of texts."""
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
                    description=f"Sample of the {record.rows} texts before filtering",
                )

    def show_run(self, run: RunRecord) -> None:
        """Publish the page of a finished run, and a table of its best texts."""
        with never_failing("the run's result"):
            texts = run.stage("labelling").read(TEXT_COLUMNS)
            order = "Best" if has_losses(texts) else "First"
            create_table_artifact(
                sample_rows(texts.sort_values(["matching_loss", "id"])),
                key=artifact_key(self.recipe.name, "texts"),
                description=f"{order} of the {len(texts)} released texts",
            )
            # The last part of a page's address is the artifact's id, so relative links work for any base address.
            links = {stage: str(page) for stage, page in self.pages.items()}
            self._publish(run_page(run, self.root.runs / run.run_id, texts, links), "result")

    def show_refusal(self, refusal: Exception) -> None:
        """Publish the reason why the privacy budget does not allow a run."""
        with never_failing("the refusal"):
            self._publish(refusal_page(self.recipe, refusal), "budget-exhausted")

    def progress(self, stage: str) -> Progress:
        """Return the progress of a stage in shards, of which it expects none yet."""
        return Progress(artifact_key(self.recipe.name, stage, "progress"), stage)

    def _plot(self, records: Sequence[StageRecord]) -> str:
        """Return the plot of a stage's page, drawn once: a cached run would spend most of its time on plots."""
        file = self.root.path / "plots" / f"{plot_key(self.recipe, records)}.md"
        if not file.is_file():
            from gradmm.flows.ui.plots import plot_markdown  # late: it imports matplotlib

            publish(file, plot_markdown(self.recipe, self.plan, records).encode())
        return file.read_text()

    def _publish(self, page: Page, name: str) -> UUID:
        return create_markdown_artifact(
            page.markdown, key=artifact_key(self.recipe.name, name), description=page.summary
        )  # pyright: ignore[reportReturnType]


@dataclass
class Progress:
    """Progress of a sharded stage, published at the start, at the end, and at most every `PROGRESS_INTERVAL`."""

    key: str
    stage: str
    parts: int = 0
    done: int = 0
    rows: int = 0
    made: int = 0
    artifact: UUID | None = None
    first_made: float | None = None
    told: float | None = None

    def add(self, rows: int, cached: bool) -> None:
        """Count a finished shard."""
        self.done += 1
        self.rows += rows
        self.made += not cached
        if self.made and self.first_made is None:
            self.first_made = time.monotonic()

    def expect(self, parts: int) -> None:
        """Expect further shards."""
        self.parts += parts

    def tell(self) -> None:
        """Publish the progress, unless the last update is too recent."""
        now = time.monotonic()
        if self.done < self.parts and self.told is not None and now - self.told < PROGRESS_INTERVAL:
            return
        self.told = now
        percentage = 100.0 * self.done / self.parts if self.parts else 100.0
        words = self._words(now)
        logger.info("%s: %s", self.stage, words)
        with never_failing(f"the progress of {self.stage}"):
            if self.artifact is None:
                self.artifact = create_progress_artifact(percentage, key=self.key, description=words)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                update_progress_artifact(self.artifact, percentage, description=words)

    def _words(self, now: float) -> str:
        words = f"{self.done} of {self.parts} shards, {self.rows} rows"
        left = self.parts - self.done
        # From the first shard that was made, for which workers had to start.
        if self.first_made is not None and self.made > 1 and left:
            words += f", about {duration(left * (now - self.first_made) / (self.made - 1))} left"
        return words
