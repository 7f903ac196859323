"""`gradmm clean` after real runs: what is removed, and that what runs refer to is cached as before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gradmm.config.recipe import Recipe
from tests.flows.test_cli import gradmm
from tests.flows.test_distil import ran, run

PRIVATE = {"epsilon": 1.0, "delta": 1e-5}


def sizes(root: Path) -> dict[str, int]:
    return {str(file.relative_to(root)): file.stat().st_size for file in root.rglob("*") if file.is_file()}


def test_what_no_run_refers_to_goes_and_what_one_does_is_still_cached(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    kept = run(tiny_recipe(), root)
    of_kept = set(sizes(root))
    dropped = run(tiny_recipe(privacy=PRIVATE, loss_selection={"per_class": 2}), root)
    shutil.rmtree(root / "runs" / dropped.run_id)  # nobody wants it any more
    (root / "unfinished").mkdir(exist_ok=True)
    (root / "unfinished" / "target_gradient-0123456789abcdef0123456789abcdef").write_bytes(b"sums")
    (root / "stages" / "generation" / ".x.parquet.abcdefgh.tmp").write_bytes(b"half")
    before = sizes(root)

    young = gradmm("clean", "--root", root)
    assert young.status == 0, young.err
    assert young.out == "0 removed, 0 bytes\n"
    for path in root.rglob("*"):
        os.utime(path, (0, 0))
    said = gradmm("clean", "--root", root, "--dry-run").out
    assert sizes(root) == before
    assert gradmm("clean", "--root", root).out == said.replace(" to remove, ", " removed, ")

    after = sizes(root)
    assert {name for name in of_kept if not name.startswith("plots/")} <= set(after)
    (target,) = {name for name in after if "/target_gradient/" in name and "stages" in name} - of_kept
    assert target == f"stages/target_gradient/{dropped.stage('target_gradient').path.name}"
    gone = set(before) - set(after)
    for name in gone:
        assert f"  {name}  (" in said
    of_shards = [name for name in gone if name.startswith("stages/generation_shard/")]
    assert len(of_shards) == 4
    assert {
        "unfinished/target_gradient-0123456789abcdef0123456789abcdef",
        "stages/generation/.x.parquet.abcdefgh.tmp",
    } <= gone
    for stage in ("generation", "loss_selection", "finetune_eval"):
        assert f"stages/{stage}/{dropped.stage(stage).path.name}" in gone
        assert f"results/{stage}/{dropped.stage(stage).path.stem}" in gone

    again = run(tiny_recipe(), root)
    assert ran(again) == []
    assert [stage.sha256 for stage in again.stages] == [stage.sha256 for stage in kept.stages]
    shards = sorted((root / "stages" / "generation_shard").iterdir())
    assert len(shards) == 4
    assert all(shard.stat().st_mtime == 0 for shard in shards)  # not made again
    redone = run(tiny_recipe(privacy=PRIVATE, loss_selection={"per_class": 2}), root)
    assert "target_gradient" not in ran(redone)
    assert redone.guarantee.releases == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--root", "none"], "none: no such folder; give the --root of your runs"),
        (["--root", "s3://bucket/team"], "s3://bucket/team: is in an object store, where nothing is removed"),
        (["--keep-days", "-1"], "--keep-days: -1 is not a number of days; give 0 or more"),
        (["--keep-days", "nan"], "--keep-days: nan is not a number of days; give 0 or more"),
    ],
)
def test_what_cannot_be_cleaned_is_told(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished = gradmm("clean", *arguments)
    assert finished.status == 2
    assert finished.err.startswith("gradmm: ")
    assert line in finished.err
    assert len(finished.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
