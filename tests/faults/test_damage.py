"""Files that are damaged, exchanged or lost between two runs: the second one ends as if they had not been.

Elsewhere: one Parquet damaged or deleted, and only its stage runs again (`tests/flows/test_distil.py`, on an
object store `test_s3_root.py`); a target deleted or damaged and the budget spent, and Prefect's results deleted
(`test_privacy.py`); a ledger edited, by a run (`test_cli.py`) and in every bit of every line
(`tests/unit/privacy/test_ledger.py`); a Parquet exchanged in the middle of a run (`test_artifacts.py`).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.faults.child import Ended, Runner
from tests.faults.conftest import Watched, are_the_same, contents, left_over
from tests.flows.test_privacy import SPACE

pytestmark = pytest.mark.faults

SEED = 5


@pytest.fixture(scope="module")
def stale(
    finished: tuple[Watched, Ended], recipe_values: dict, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """For each stage what another run, with other settings, has left."""
    folder = tmp_path_factory.mktemp("stale")
    recipe, log = folder / "tiny.yaml", folder / "log"
    log.mkdir()
    others = {
        "seed": 5,
        "target_gradient": SPACE | {"public_texts": 9},
        "finetune_eval": recipe_values["finetune_eval"] | {"steps": 3},
    }
    recipe.write_text(yaml.safe_dump(recipe_values | others))
    ended = Runner(recipe, log, finished[0].runner.api)(folder / "root")
    assert ended.status == 0, ended.said
    return {file.parent.name: file.read_bytes() for file in folder.glob("root/stages/*/*.parquet")}


@pytest.fixture
def root(finished: tuple[Watched, Ended]) -> Iterator[Watched]:
    """The finished root. References hold absolute paths, so it stays in its place, and is put right afterwards."""
    path = finished[0].path
    pristine = path.with_name("pristine")
    shutil.copytree(path, pristine)
    yield Watched(path, finished[0].runner)
    shutil.rmtree(path)
    pristine.rename(path)


Damage = Callable[[Path, dict[str, bytes]], bytes]


def flipped(file: Path, stale: dict[str, bytes]) -> bytes:
    content = bytearray(file.read_bytes())
    content[random.Random(SEED).randrange(len(content))] ^= 1
    return bytes(content)


DAMAGES: dict[str, Damage] = {
    "truncated": lambda file, stale: file.read_bytes()[: file.stat().st_size // 2],
    "empty": lambda file, stale: b"",
    "flipped": flipped,
    "stale": lambda file, stale: stale[file.parent.name],
}


def swap(files: list[Path]) -> None:
    """Each gets the next one's content; shards, which are neighbours, each other's."""
    held = [file.read_bytes() for file in files]
    for file, content in zip(files, held[1:] + held[:1], strict=True):
        file.write_bytes(content)


@pytest.mark.parametrize("damage", [*DAMAGES, "swapped"])
def test_damaged_stages_are_made_again_to_the_same_bytes(
    root: Watched, stale: dict[str, bytes], damage: str
) -> None:
    before = contents(root.path)
    files = sorted(set(root.path.glob("stages/*/*")) - set(root.path.glob("stages/target_gradient/*")))
    if damage == "swapped":
        swap(files)
    else:
        files = random.Random(SEED).sample(files, len(files) // 2)
        for file in files:
            file.write_bytes(DAMAGES[damage](file, stale))
    changed = {file for file in files if before.get(file.relative_to(root.path).as_posix()) != file.read_bytes()}
    assert len(changed) == len(files)
    unchanged(root, before)


@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_damaged_results_of_prefect_are_written_again(root: Watched, damage: str) -> None:
    before = contents(root.path)
    for record in root.path.glob("results/*/*"):
        record.write_bytes(DAMAGES[damage](record, {}))
    unchanged(root, before)


@pytest.mark.parametrize("stages", ["*", "generation_shard"])
def test_exchanged_results_of_prefect_are_told(root: Watched, stages: str) -> None:
    before = contents(root.path)
    swap(sorted(root.path.glob(f"results/{stages}/*")))
    assert "it is the record of another result; delete it" in root.run().complaint
    shutil.rmtree(root.path / "results")
    unchanged(root, before)


def unchanged(root: Watched, before: dict[str, bytes]) -> None:
    """The next run leaves every stage and the release as they were, and has drawn no noise."""
    ended = root.run()
    assert ended.status == 0, ended.said
    assert "draw" not in ended.events
    after = contents(root.path)
    assert set(after) == set(before)
    are_the_same(after, before)
    assert left_over(root.path) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_target_that_was_damaged_is_drawn_again_and_counted(
    root: Watched, stale: dict[str, bytes], damage: str
) -> None:
    (target,) = root.path.glob("stages/target_gradient/*")
    target.write_bytes(DAMAGES[damage](target, stale))
    assert len(root.ledger()) == 1
    ended = root.run()
    assert ended.events.count("draw") == 1
    assert len(root.ledger()) == 2
    root.is_as_undisturbed(target_was_lost=True)


def test_an_older_target_of_the_same_data_and_settings_is_taken_as_it_was_paid_for(root: Watched) -> None:
    (target,) = root.path.glob("stages/target_gradient/*")
    older = target.read_bytes()
    assert root.run(None, "--set", "privacy.redraw=true").events.count("draw") == 1
    assert target.read_bytes() != older
    target.write_bytes(older)
    ended = root.run()
    assert ended.status == 0, ended.said
    assert "draw" not in ended.events
    assert len(root.ledger()) == 2
    root.is_as_undisturbed(target_was_lost=True)


def test_a_ledger_that_is_older_than_the_target_is_refused_until_its_backup_is_back(root: Watched) -> None:
    (file,) = root.path.glob("ledger/*.jsonl")
    whole = file.read_bytes()
    before = contents(root.path)
    for damaged in (b"", whole.replace(b'"released"', b'"reledsed"')):
        file.write_bytes(damaged)
        ended = root.runner(root.path)
        assert "restore" in ended.complaint
        assert "draw" not in ended.events
    file.write_bytes(whole)
    unchanged(root, before)
