"""A server that goes away, for good or for a while. It comes first by name, as these tests mostly wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.conftest import IN_GENERATION, Watched
from tests.faults.fault import Fault

pytestmark = pytest.mark.faults


def test_a_server_that_is_killed_is_told_in_one_line_and_the_next_run_goes_on(
    watched: Watched, tmp_path: Path
) -> None:
    alone = replace(watched, runner=replace(watched.runner, api=None, home=tmp_path / "home"))
    ended = alone.run(Fault("no server", IN_GENERATION))
    assert "the Prefect server stopped answering" in ended.complaint
    assert len(list(watched.path.glob("stages/generation_shard/*"))) >= 1
    watched.targets, watched.draws = alone.targets, alone.draws
    watched.finish()


def test_a_server_that_comes_back_is_waited_for(watched: Watched, tmp_path: Path) -> None:
    alone = replace(watched, runner=replace(watched.runner, api=None, home=tmp_path / "home"))
    ended = alone.run(Fault("new server", IN_GENERATION))
    assert ended.status == 0, ended.said
    watched.is_as_undisturbed()
