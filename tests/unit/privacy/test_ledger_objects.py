"""The ledger in an object store, which has no lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upath import UPath

from gradmm.errors import BudgetExhausted, InputError
from gradmm.privacy import ledger_store
from gradmm.privacy.ledger import Budget, Ledger, composed_epsilon
from gradmm.storage.location import location
from tests.conftest import examples
from tests.object_store import new_bucket, object_store, objects
from tests.unit.privacy.test_ledger import DELTA, DIGEST, budget, release, released


def ledger_in(root: UPath) -> Ledger:
    return Ledger.of(root, "stanfordnlp/sst2")


def new_store() -> UPath:
    root = location(f"memory://{uuid4().hex}")
    assert isinstance(root, UPath)
    return root


def budget_for(releases: int) -> Budget:
    epsilon = composed_epsilon([release()] * releases, DELTA, "add-or-remove") * 1.001
    assert epsilon < composed_epsilon([release()] * (releases + 1), DELTA, "add-or-remove")
    return budget(epsilon)


@pytest.fixture
def root() -> UPath:
    return new_store()


@pytest.fixture
def ledger(root: UPath) -> Ledger:
    return ledger_in(root)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Run a function between the next read of the ledger and the write that depends on it."""
    create = ledger_store.create

    def once(does: Callable[[], object]) -> None:
        def late(place: UPath, content: bytes) -> None:
            monkeypatch.setattr(ledger_store, "create", create)
            does()
            create(place, content)

        monkeypatch.setattr(ledger_store, "create", late)

    return once


def test_an_event_is_an_object_with_the_line_of_a_file(ledger: Ledger, root: UPath) -> None:
    assert ledger.entries() == []
    assert objects(root) == {}, "reading creates no objects"
    with ledger.charge(release(), budget(1.0)) as finish:
        (begun,) = ledger.entries()
        finished = finish(DIGEST)
    assert finished == begun.model_copy(update={"sha256": DIGEST})
    assert ledger_in(root).entries() == [finished]
    folder = f"ledger/stanfordnlp-sst2-{sha256(b'stanfordnlp/sst2').hexdigest()[:8]}"
    written = objects(root)
    assert list(written) == [f"{folder}/00000001.json", f"{folder}/00000002.json"]
    assert [b'"intent"' in line for line in written.values()] == [True, False]


def test_a_file_and_objects_hold_the_same_lines(ledger: Ledger, root: UPath, tmp_path) -> None:
    for _ in range(3):
        released(ledger)
    file = Ledger.of(tmp_path, "stanfordnlp/sst2")
    file.file.parent.mkdir()
    file.file.write_bytes(b"".join(line + b"\n" for line in objects(root).values()))
    assert file.entries() == ledger.entries()


def test_a_release_past_the_budget_is_refused_and_writes_nothing(ledger: Ledger, root: UPath) -> None:
    released(ledger)
    before = objects(root)
    with pytest.raises(BudgetExhausted, match="1 release so far"), ledger.charge(release(), budget_for(1)):
        pytest.fail("charged")
    assert objects(root) == before


def test_a_release_is_refused_if_another_run_spends_the_budget_meanwhile(
    ledger: Ledger, root: UPath, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    meanwhile(lambda: released(ledger_in(root)))
    with pytest.raises(BudgetExhausted, match="1 release so far"), ledger.charge(release(), budget_for(1)):
        pytest.fail("charged")
    assert len(ledger.entries()) == 1


def test_a_release_stops_before_its_noise_if_a_related_ledger_is_charged_meanwhile(
    root: UPath, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    one, copy = (Ledger.of(root, name) for name in ("one", "copy"))
    for ledger in (one, copy):
        ledger.count_records(["warm soup"])
    meanwhile(lambda: released(copy))
    with pytest.raises(BudgetExhausted, match="1 release so far"), one.charge(release(), budget_for(1)):
        pytest.fail("noise would be drawn")
    assert [len(ledger.entries()) for ledger in (one, copy)] == [1, 1]  # both charged: too much, never too little


def test_the_second_of_two_concurrent_charges_is_written_after_the_first(
    ledger: Ledger, root: UPath, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    meanwhile(lambda: released(ledger_in(root), "1" * 64))
    released(ledger, "2" * 64)
    assert [entry.sha256 for entry in ledger.entries()] == ["1" * 64, "2" * 64]


def test_an_artifact_found_by_another_run_is_finished_once(
    ledger: Ledger, root: UPath, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    with ledger.charge(release(), budget(1.0)) as finish:
        meanwhile(lambda: ledger_in(root).adopt("k1", DIGEST))
        assert finish(DIGEST).sha256 == DIGEST
    assert len(objects(root)) == 2
    with ledger.charge(release(), budget(100.0)):
        meanwhile(lambda: ledger_in(root).adopt("k1", "1" * 64))
        adopted = ledger.adopt("k1", "1" * 64)
    assert adopted == ledger.entries()[1]
    assert len(objects(root)) == 4


def test_one_charge_pays_for_one_artifact(ledger: Ledger) -> None:
    with ledger.charge(release(), budget(1.0)) as finish:
        finish(DIGEST)
        assert finish(DIGEST).sha256 == DIGEST
        with pytest.raises(ValueError, match="was already finished"):
            finish("cd" * 32)
    assert ledger.adopt("k1", "cd" * 32) is None
    assert [entry.sha256 for entry in ledger.entries()] == [DIGEST]


def test_appending_gives_up_if_other_runs_never_stop(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object) -> None:
        raise FileExistsError

    monkeypatch.setattr(ledger_store, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(ledger_store, "create", taken)
    with pytest.raises(InputError, match="another run has been releasing"), ledger.charge(release(), budget(1.0)):
        pytest.fail("charged")


def test_a_missing_edited_or_exchanged_object_is_detected(ledger: Ledger, root: UPath) -> None:
    for _ in range(2):
        released(ledger)
    sound = objects(root)
    names = list(sound)

    def assert_damaged(told: str, **contents: bytes | None) -> None:
        for position, name in enumerate(names):
            content = contents.get(f"line{position + 1}", sound[name])
            if content is None:
                (root / name).unlink()
            else:
                root.fs.pipe_file((root / name).path, content)
        with pytest.raises(InputError, match=told) as error:
            ledger.entries()
        assert error.value.where == str(ledger.file)

    for position in (1, 2, 3):
        assert_damaged(f"line {position} is missing; restore it", **{f"line{position}": None})
    assert_damaged("line 1 or one before it is damaged", line1=sound[names[0]].replace(b"100.0", b"900.0"))
    assert_damaged("line 2 or one before it", line2=sound[names[2]], line3=sound[names[1]])
    assert_damaged("line 4 or one before it", line4=b"")


def test_other_objects_beside_the_lines_are_ignored(ledger: Ledger) -> None:
    released(ledger)
    for name in ("notes.txt", "00000009.json.bak", "9.json"):
        (ledger.file / name).write_bytes(b"?")
    assert len(ledger.entries()) == 1


@examples(30)
@given(overtaken=st.lists(st.booleans(), min_size=1, max_size=8), room=st.integers(1, 8))
def test_whoever_comes_between_no_release_is_lost_or_passes_the_budget(overtaken: list[bool], room: int) -> None:
    """Runs come one after another. The runs after an overtaken one come between its read and its write."""
    root, charged = new_store(), []
    create = ledger_store.create

    def charge_from(position: int) -> None:
        def after_others(place: UPath, content: bytes) -> None:
            ledger_store.create = create
            charge_from(position + 1)
            create(place, content)

        if position == len(overtaken):
            return
        if overtaken[position]:
            ledger_store.create = after_others
        try:
            with ledger_in(root).charge(release(), budget_for(room)) as finish:
                charged.append(finish(f"{position:064}"))
        except BudgetExhausted:
            ledger_store.create = create
        if not overtaken[position] or position + 1 == len(overtaken):
            charge_from(position + 1)

    charge_from(0)
    entries = ledger_in(root).entries()
    assert len(entries) == len(charged) == min(room, len(overtaken))
    assert sorted(e.sha256 or "" for e in entries) == sorted(e.sha256 or "" for e in charged)


def test_threads_that_race_for_a_budget_share_it_exactly() -> None:
    fits, each = 7, 5
    with object_store():
        root = new_bucket("race") / "team"

        def releases(name: str) -> list[str]:
            published = []
            for number in range(each):
                digest = sha256(f"{name} {number}".encode()).hexdigest()
                try:
                    with ledger_in(root).charge(release(), budget_for(fits)) as finish:
                        published.append(digest)
                        finish(digest)
                except BudgetExhausted:
                    pass
            return published

        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(releases, ["one", "other"])
        entries = ledger_in(root).entries()
    assert one
    assert other
    assert len(one) + len(other) == fits
    assert sorted(one + other) == sorted(entry.sha256 or "" for entry in entries)
