"""A small private recipe, and what has to hold of a root after a fault."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL

from gradmm.lm.model_reference import ModelReference
from gradmm.privacy.ledger import Entry, Ledger
from gradmm.storage.artifacts import file_digest
from gradmm.storage.atomic import NAME
from tests.faults.child import Ended, Runner
from tests.faults.fault import Fault
from tests.flows.conftest import prefect_server as prefect_server
from tests.flows.conftest import tiny_data as tiny_data
from tests.flows.conftest import tiny_recipe_values
from tests.flows.test_privacy import PRIVACY, SPACE

#: The first of four shards is there, and its record is about to be written.
IN_GENERATION = "open results/generation_shard/*"


@pytest.fixture(scope="session")
def recipe_values(tiny_data: Path, tiny_model: ModelReference) -> dict:
    """A private recipe whose budget has room for every target that is lost."""
    values = tiny_recipe_values(tiny_data, tiny_model)
    values["privacy"] = PRIVACY | {"budget_epsilon": 1000.0}
    values["target_gradient"] = SPACE | {"batch_size": 8}
    values["generation"] |= {"shard_size": 3}
    return values


@pytest.fixture(scope="session")
def runner(recipe_values: dict, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("faults")
    recipe, log = folder / "tiny.yaml", folder / "log"
    recipe.write_text(yaml.safe_dump(recipe_values))
    log.mkdir()
    return Runner(recipe, log, str(PREFECT_API_URL.value()))


@dataclass
class Watched:
    """A root, and what has been seen there so far."""

    path: Path
    runner: Runner
    draws: int = 0
    targets: set[str] = field(default_factory=set)

    def run(self, fault: Fault | None = None, *arguments: str) -> Ended:
        """One run. However it ended, the ledger must have counted all that was drawn, and all that was there."""
        ended = self.runner(self.path, fault, *arguments)
        self.draws += ended.events.count("draw")
        self.targets |= {file_digest(file) for file in self.path.glob("stages/target_gradient/*.parquet")}
        entries = self.ledger()
        assert self.draws <= len(entries), ended.events[-3:]
        assert len(self.targets) <= len(entries), ended.events[-3:]
        return ended

    def ledger(self) -> list[Entry]:
        return [entry for file in self.path.glob("ledger/*.jsonl") for entry in Ledger(file).entries()]

    def finish(self) -> None:
        """The next run, undisturbed, ends as if nothing had happened before it, but for the target's noise."""
        ended = self.run()
        assert ended.status == 0, ended.said
        self.is_as_undisturbed()

    def is_as_undisturbed(self, target_was_lost: bool = False) -> None:
        """Every stage and the release are, byte for byte, those of one run from the same target.

        What was made from a target that was there before is still there.
        """
        charged = {entry.sha256 for entry in self.ledger()}
        (target,) = self.path.glob("stages/target_gradient/*.parquet")
        assert file_digest(target) in charged
        other = self.path.with_name(f"{self.path.name}-undisturbed")
        shutil.copytree(self.path / "ledger", other / "ledger")
        shutil.copytree(target.parent, other / "stages" / "target_gradient")
        ended = self.runner(other)
        assert ended.status == 0, ended.said
        assert "draw" not in ended.events
        mine, its = contents(self.path), contents(other)
        assert set(its) <= set(mine)
        assert target_was_lost or set(mine) == set(its)
        are_the_same(mine, its)
        assert left_over(self.path) == []
        shutil.rmtree(other)


def contents(root: Path) -> dict[str, bytes]:
    """All files of a root by their names, without runs that were not finished; those of the last run by theirs.

    But for the mechanism's audits, which every run draws anew under a key of its own, and Prefect's records of
    tasks that failed, `results/<digest>`, which `gradmm clean` removes.
    """
    files = {file.relative_to(root): file for file in root.rglob("*") if file.is_file()}
    *_, last = sorted(root.glob("runs/*/run.json"))
    of_failure = {name for name in files if name.parent == Path("results")}
    named = {n.as_posix(): file for n, file in files.items() if n.parts[0] != "runs" and n not in of_failure}
    named |= {f.relative_to(last.parent).as_posix(): f for f in last.parent.rglob("*") if f.is_file()}
    return {name: file.read_bytes() for name, file in named.items() if "mechanism_audit" not in name}


def are_the_same(mine: dict[str, bytes], its: dict[str, bytes]) -> None:
    """Stages and release are."""
    for name, content in its.items():
        if name.startswith(("stages/", "release/")):
            assert mine[name] == content, name


def left_over(root: Path) -> list[str]:
    """What is there under a temporary name, or to go on from."""
    temporary = [str(path.relative_to(root)) for path in root.rglob("*") if NAME.fullmatch(path.name)]
    return temporary + [str(path.relative_to(root)) for path in root.glob("unfinished/*")]


@pytest.fixture
def watched(runner: Runner, tmp_path: Path) -> Watched:
    return Watched(tmp_path / "root", runner)


@pytest.fixture(scope="session")
def finished(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Ended]:
    """A root in which one run has ended undisturbed, and how it did. To be copied, not changed."""
    root = Watched(tmp_path_factory.mktemp("finished") / "root", runner)
    ended = root.run()
    assert ended.status == 0, ended.said
    return root, ended
