"""Texts of private rows are nowhere but in their data: planted words are searched for in all that runs leave.

One process makes a whole private run and then runs that fail, with the umask that most systems have, in a root
that was there before, and with folders of its own for everything that a process may write to. It, its server and
all that they start are refused the network (`only_loopback/sitecustomize.py`), and try nothing there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from gradmm.lm.model_reference import ModelReference
from tests.flows.conftest import tiny_recipe_values
from tests.trust.network import refused, refusing_network
from tests.trust.planted_faults import HUB, READERS

pytestmark = pytest.mark.slow

SPLITS = {"train": 40, "validation": 16, "test": 16}

#: Each text is words with a word in the middle that begins like this and ends like no other row's.
PLANTED = "zqxwvj"


def marker(split: str, row: int) -> str:
    return f"{PLANTED}{hashlib.sha256(f'{split} {row}'.encode()).hexdigest()[:10]}"


@dataclass(frozen=True)
class Surroundings:
    """What is there after all runs. `output` is what they printed, both streams."""

    folder: Path
    root: Path
    data: Path
    output: str
    attempts: Path

    def statuses(self) -> dict[str, int]:
        ended = re.findall(r"^# (.+) ended with (\d+)$", self.output, re.MULTILINE)
        return {name: int(status) for name, status in ended}


def rows_of(split: str) -> pd.DataFrame:
    rows = range(SPLITS[split])
    texts = [f"the soup {marker(split, row)} was {('bad', 'good')[row % 2]}" for row in rows]
    return pd.DataFrame({"text": texts, "label": [row % 2 for row in rows]})


def write_bad_data(folder: Path) -> list[Path]:
    """Data sets with one fault each, such as people's data have, whose message might quote a row."""
    good = rows_of("train")
    first = good["text"][0]
    faults = {
        "headerless.csv": good.to_csv(index=False, header=False),
        "wordy-labels.csv": good.assign(label=good["text"]).to_csv(index=False),
        "keys.jsonl": f'{{"text": {{"{first}": 1}}, "label": 0}}\n{{"text": {{"{first}": "x"}}, "label": 0}}\n',
    }
    for name, content in faults.items():
        place = folder / Path(name).stem
        place.mkdir(parents=True)
        (place / f"train{Path(name).suffix}").write_text(content)
    return [folder / Path(name).stem for name in faults]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelReference) -> Surroundings:
    inputs, folder = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("surroundings")
    data = inputs / "data"
    data.mkdir()
    for split in SPLITS:
        rows_of(split).to_parquet(data / f"{split}.parquet")
    bad_data = write_bad_data(inputs / "bad")
    values = tiny_recipe_values(data, tiny_model) | {
        "privacy": {"epsilon": 4.0, "delta": 1e-5, "declared_records": 200, "budget_epsilon": 9.0},
        "target_gradient": {"space": "label-rows", "centred": True, "public_texts": 8, "public_text_tokens": 5},
    }
    recipe = inputs / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(values))
    own = {name: folder / name for name in ("HOME", "PREFECT_HOME", "TMPDIR", "work", "root")}
    for place in own.values():
        place.mkdir()
        place.chmod(0o755)
    environment = refusing_network(attempts := inputs / "attempts")
    environment |= {name: str(own[name]) for name in ("HOME", "PREFECT_HOME", "TMPDIR")}
    environment |= {"PREFECT_LOGGING_LEVEL": "DEBUG"}
    command = [sys.executable, "-m", "tests.trust.planted_faults", recipe, own["root"], *bad_data]
    finished = subprocess.run(
        list(map(str, command)),
        env=environment, cwd=own["work"], umask=0o022,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-5000:]
    return Surroundings(folder, own["root"], data, finished.stdout, attempts)


def as_written(piece: str) -> set[bytes]:
    """A piece of text as bytes, also in UTF-16, and as base64 at each of the three places it can begin at."""
    plain = piece.encode()
    shifted = [base64.b64encode(b"\0" * shift + plain)[(0, 2, 3)[shift] :] for shift in range(3)]
    # But for the last characters, which depend on what follows.
    return {plain, piece.encode("utf-16-le"), *(encoded.rstrip(b"=")[:-2].lower() for encoded in shifted)}


def traces(folder: Path, pieces: list[str], token_ids: list[list[int]]) -> Iterator[str]:
    """Where any of the pieces of texts is: in names, in bytes, and in tables, as text or as tokens."""
    patterns = {pattern for piece in pieces for pattern in as_written(piece)}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        # base64 is broken into lines, in JSON as two characters each.
        content = file.read_bytes().lower().replace(rb"\n", b"").replace(b"\n", b"")
        if any(pattern in content for pattern in patterns):
            yield f"{file}: bytes"
        if any(piece in str(file).lower() for piece in pieces):
            yield f"{file}: name"
        if file.suffix == ".parquet":
            yield from (f"{file}: {place}" for place in _traces_in_table(pq.read_table(file), pieces, token_ids))


def _traces_in_table(table: pa.Table, pieces: list[str], token_ids: list[list[int]]) -> Iterator[str]:
    for name in table.column_names:
        values = table[name].to_pylist()
        if any(piece in str(values).lower() for piece in pieces):
            yield f"column {name}"
        if pa.types.is_list(table[name].type):
            sequences = [f",{','.join(map(str, value or []))}," for value in values]
            if any(f",{','.join(map(str, ids))}," in sequence for ids in token_ids for sequence in sequences):
                yield f"tokens in column {name}"


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    """What all markers have in common, and what each has alone."""
    return [
        PLANTED,
        *(marker(split, row)[len(PLANTED) :] for split, rows in SPLITS.items() for row in range(rows)),
    ]


@pytest.fixture(scope="module")
def marker_tokens(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [tokenizer(marker("train", row), add_special_tokens=False)["input_ids"][:6] for row in range(40)]


def test_every_run_ended_as_it_should(surroundings: Surroundings) -> None:
    """Or the searches below would search nothing."""
    statuses = surroundings.statuses()
    assert (statuses.pop("whole"), statuses.pop("audit")) == (0, 0)
    ours = {name for name, status in statuses.items() if status == 1}
    assert ours == {"dataset_fingerprint", "count_records", *READERS}
    assert set(statuses.values()) == {1, 2}
    assert len(statuses) == 13


def test_the_search_finds_what_is_there(
    surroundings: Surroundings, pieces: list[str], marker_tokens: list[list[int]], tmp_path: Path
) -> None:
    assert len(set(pieces)) == 1 + sum(SPLITS.values())
    found = list(traces(surroundings.data, pieces, marker_tokens))
    assert {Path(line.partition(":")[0]).stem for line in found} == set(SPLITS)
    assert any(line.endswith("column text") for line in found)
    pq.write_table(pa.table({"ids": [[5, *marker_tokens[0], 5]]}), tmp_path / "ids.parquet")
    (tmp_path / f"{marker('test', 3)}.txt").touch()
    found = {line.rpartition("/")[2].partition(": ")[2] for line in traces(tmp_path, pieces, marker_tokens)}
    assert found == {"tokens in column ids", "name"}


@pytest.mark.parametrize("before", ["", "x", "xy", "xyz"])
def test_the_search_finds_pickles_in_json(before: str, pieces: list[str], tmp_path: Path) -> None:
    encoded = base64.encodebytes(pickle.dumps(KeyError(f"{before * 19} {marker('train', 7)} was bad"))).decode()
    (tmp_path / "result").write_text(json.dumps({"result": encoded}))
    assert list(traces(tmp_path, pieces, [])) == [f"{tmp_path / 'result'}: bytes"]


def test_no_text_is_in_what_was_printed(surroundings: Surroundings, pieces: list[str]) -> None:
    lines = surroundings.output.splitlines()
    assert [line for line in lines if any(piece in line.lower() for piece in pieces)] == []


def test_no_text_is_in_any_file_but_where_messages_are_withheld_to(
    surroundings: Surroundings, pieces: list[str], marker_tokens: list[list[int]]
) -> None:
    found = list(traces(surroundings.folder, pieces, marker_tokens))
    errors = f"{surroundings.root / 'errors'}/"
    assert [line for line in found if not line.startswith(errors)] == []
    assert len(found) == 2 + len(READERS)  # and there they are, with where in the code it was


def test_prefects_database_has_the_runs_their_logs_and_pages(surroundings: Surroundings) -> None:
    """So that it was worth searching."""
    with sqlite3.connect(surroundings.folder / "PREFECT_HOME" / "prefect.db") as database:
        for table, least in {"flow_run": 11, "task_run": 40, "log": 100, "artifact": 10}.items():
            assert database.execute(f"select count(*) from {table}").fetchone()[0] >= least


def test_all_of_the_root_is_its_owners_alone(surroundings: Surroundings) -> None:
    open_to_others = {
        str(path.relative_to(surroundings.folder)): f"{path.stat().st_mode & 0o777:o}"
        for place in (surroundings.root, surroundings.folder / "PREFECT_HOME")
        for path in place.rglob("*")
        if path.stat().st_mode & 0o077
    }
    assert open_to_others == {}


def test_nothing_but_this_machine_is_ever_asked(surroundings: Surroundings) -> None:
    """But for the hub, where a recipe names something there: the hook sees that, and it ends in one line."""
    attempts = refused(surroundings.attempts)
    of_hub = {name: attempts.pop(name) for name in ("hub model", "hub data")}
    assert attempts.keys() >= {"whole", "audit", "budget"}
    assert not any(attempts.values()), attempts
    assert of_hub["hub model"]  # the second run of the same minute knows that the hub does not answer
    for name, asked in of_hub.items():
        assert set(asked) <= {"socket.getaddrinfo huggingface.co"}
        said = surroundings.output.partition(f"# {name} begins\n")[2].partition("\n# ")[0]
        (line,) = [line for line in said.splitlines() if line.startswith("gradmm: ")]
        assert "cannot be loaded" in line
        assert HUB in line
        assert f"# {name} ended with 2" in surroundings.output
