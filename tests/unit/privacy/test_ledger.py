from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from dp_accounting import GaussianDpEvent, ZCDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from gradmm.errors import BudgetExhausted, InputError
from gradmm.privacy import ledger as ledger_module
from gradmm.privacy import ledger_store
from gradmm.privacy.ledger import Adjacency, Budget, Ledger, Release, composed_epsilon
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.storage.location import location
from tests.conftest import examples

DELTA = 1e-5
DIGEST = "ab" * 32


def release(**changes: object) -> Release:
    values = {
        "recipe": "sst2", "epsilon": 1.0, "delta": DELTA, "sigma": 100.0, "clipping_norm": 1.0,
        "adjacency": "add-or-remove", "space": "output head", "stage_key": "k1",
        "settings_key": "s1",
    }  # fmt: skip
    return Release.model_validate(values | changes)


def calibrated(epsilon: float, noise: str = "gaussian", **changes: object) -> Release:
    """Make a release whose noise is calibrated to its claim."""
    values = {"epsilon": epsilon, "delta": DELTA, "clipping_norm": 1.0, "adjacency": "add-or-remove"} | changes
    how = {"calibration": "analytic", "sampler": "discrete" if noise == "discrete-gaussian" else "floating-point"}
    mechanism = GaussianMechanism.model_validate(values | how)
    return release(noise=noise, sigma=mechanism.sigma, **values | {"clipping_norm": mechanism.record_norm})


def budget(epsilon: float, delta: float = DELTA, adjacency: str = "add-or-remove") -> Budget:
    return Budget.model_validate({"epsilon": epsilon, "delta": delta, "adjacency": adjacency})


def released(ledger: Ledger, digest: str = DIGEST, **changes: object) -> None:
    with ledger.charge(release(**changes), budget(100.0)) as finish:
        finish(digest)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.of(tmp_path, "stanfordnlp/sst2")


# Composition


@pytest.mark.parametrize("adjacency", ["add-or-remove", "replace"])
@pytest.mark.parametrize("sigmas", [[5.0], [2.0, 2.0, 2.0], [1.5, 4.0, 40.0], [8.0] * 20])
def test_composition_agrees_with_the_privacy_loss_distribution(sigmas: list[float], adjacency: Adjacency) -> None:
    interval = 1e-3
    accountant = PLDAccountant(value_discretization_interval=interval)
    for sigma in sigmas:
        accountant.compose(GaussianDpEvent(sigma / 3.0 / (2 if adjacency == "replace" else 1)))
    upper = accountant.get_epsilon(DELTA)
    exact = composed_epsilon([release(sigma=s, clipping_norm=3.0) for s in sigmas], DELTA, adjacency)
    assert exact == pytest.approx(upper, rel=1e-3)
    assert upper >= exact * (1 - 1e-9)


@examples(150)
@given(
    log_epsilon=st.floats(-4, 1.7), log_delta=st.floats(-12, -2), log_norm=st.floats(-3, 3),
    adjacency=st.sampled_from(["add-or-remove", "replace"]),
)  # fmt: skip
def test_one_release_fits_a_budget_of_its_own_epsilon_and_no_less(
    tmp_path_factory: pytest.TempPathFactory,
    log_epsilon: float,
    log_delta: float,
    log_norm: float,
    adjacency: str,
) -> None:
    epsilon, delta = 10**log_epsilon, 10**log_delta
    one = calibrated(epsilon, delta=delta, adjacency=adjacency, clipping_norm=10**log_norm)
    empty = Ledger(tmp_path_factory.getbasetemp() / "ledger" / "empty.jsonl")
    empty.check(budget(epsilon, delta, adjacency), one)
    with pytest.raises(InputError, match="0 releases so far"):
        empty.check(budget(epsilon * (1 - 1e-6), delta, adjacency), one)


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
def test_one_discrete_release_fits_a_budget_of_its_own_epsilon(ledger: Ledger, epsilon: float) -> None:
    one = calibrated(epsilon, "discrete-gaussian")
    ledger.check(budget(epsilon), one)
    with pytest.raises(InputError, match="0 releases so far"):
        ledger.check(budget(epsilon * (1 - 1e-6)), one)


def test_composition_uses_the_requested_adjacency_not_the_recorded_one() -> None:
    replace = calibrated(1.0, adjacency="replace")
    assert composed_epsilon([replace], DELTA, "replace") == pytest.approx(1.0)
    assert composed_epsilon([replace], DELTA, "add-or-remove") == pytest.approx(
        composed_epsilon(
            [calibrated(1.0).model_copy(update={"sigma": 2 * calibrated(1.0).sigma})], DELTA, "add-or-remove"
        )
    )


def test_discrete_noise_is_composed_by_its_zero_concentrated_privacy() -> None:
    mixed = [release(sigma=3.0, noise="discrete-gaussian"), release(sigma=5.0)]
    accountant = RdpAccountant().compose(ZCDpEvent(1 / (2 * 3.0**2))).compose(GaussianDpEvent(5.0))
    loose = composed_epsilon(mixed, DELTA, "add-or-remove")
    assert loose == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-4)
    continuous = [one.model_copy(update={"noise": "gaussian"}) for one in mixed]
    assert loose > composed_epsilon(continuous, DELTA, "add-or-remove")
    assert composed_epsilon([], DELTA, "replace") == 0.0


@pytest.mark.parametrize("field", ["sigma", "clipping_norm", "epsilon"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_release_of_unknown_cost_is_invalid(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        release(**{field: value})


# Charging


def test_a_release_reads_back(ledger: Ledger) -> None:
    assert ledger.entries() == []
    assert ledger.spent(DELTA, "replace") == 0.0
    with ledger.charge(release(), budget(1.0)) as finish:
        begun = ledger.entries()[0]
        assert begun.sha256 is None
        finished = finish(DIGEST)
    again = Ledger.of(ledger.file.parents[1], "stanfordnlp/sst2")
    assert again.entries() == [finished] == [begun.model_copy(update={"sha256": DIGEST})]
    assert finished.release == release()
    assert timedelta(0) <= datetime.now(UTC) - finished.time < timedelta(minutes=1)
    assert [json.loads(line)["event"] for line in ledger.file.read_text().splitlines()] == ["intent", "released"]


def test_a_release_past_the_budget_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    one = calibrated(0.05)
    with ledger.charge(one, budget(0.05)) as finish:
        finish(DIGEST)
    before = ledger.file.read_bytes()
    told = (
        r"^privacy\.budget_epsilon: this release would bring the composed epsilon to 0\.0\d+ at delta 1e-05 "
        r"\(add-or-remove\), above the budget of 0\.05 \(1 release so far\); keep the existing target; the data's "
        r"owner can raise the budget$"
    )
    with pytest.raises(InputError, match=told), ledger.charge(one, budget(0.05)):
        pytest.fail("charged")
    with pytest.raises(InputError, match=told):
        ledger.check(budget(0.05), one)
    for epsilon in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="epsilon"):
            budget(epsilon)
    assert ledger.file.read_bytes() == before
    ledger.check(budget(1.001 * composed_epsilon([one, one], DELTA, "add-or-remove")), one)


def test_all_releases_are_judged_by_the_budget_in_the_ledger(ledger: Ledger) -> None:
    """A release at a delta of its own would pass, and the two of them compose to several times the budget."""
    assert ledger.budget() is None
    held = ledger.set_budget(budget(1.0, 1e-6), unless_set=True)
    assert held == ledger.budget() == ledger.set_budget(budget(9.0, 0.4), unless_set=True) == budget(1.0, 1e-6)
    with ledger.charge(calibrated(1.0, delta=1e-6), budget(1.0, 1e-6)) as finish:
        finish(DIGEST)
    with pytest.raises(BudgetExhausted, match=r"at delta 1e-06 \(add-or-remove\), above the budget of 1 "):
        ledger.check(budget(1.0, 0.4), calibrated(0.5, delta=0.4))
    ledger.set_budget(budget(9.0, 1e-6, "replace"))
    assert ledger.budget() == budget(9.0, 1e-6, "replace")
    ledger.check(budget(0.1), calibrated(0.5))
    assert len(ledger.entries()) == 1
    assert json.loads(ledger.file.read_text().splitlines()[0])["event"] == "budget"


@pytest.mark.parametrize("place", ["folder", "object store"])
def test_a_release_counts_in_all_ledgers_that_share_a_record(tmp_path: Path, place: str) -> None:
    root = tmp_path if place == "folder" else location(f"memory://{uuid4().hex}")
    one, other, third = (Ledger.of(root, name) for name in ("one", "other", "third"))
    one.count_records(["a", "b"])
    other.count_records(["b", "c"])
    third.count_records(["c", "d"])
    one.set_budget(budget(1.0))
    with one.charge(calibrated(1.0), budget(9.0)) as finish:
        finish(DIGEST)
    assert [ledger.name for ledger in other.related()] == sorted([one.name, other.name, third.name])
    assert [ledger.name for ledger in Ledger.all(root)] == [one.name]
    # Its own budget allows a second release, the other's does not.
    with pytest.raises(BudgetExhausted, match=f"budget of 1 of {one.name}, which counts some of these records"):
        other.check(budget(9.0), calibrated(1.0))
    assert other.spent(DELTA, "add-or-remove") == pytest.approx(1.0)
    assert third.spent(DELTA, "add-or-remove") == 0.0
    third.check(budget(1.0), calibrated(1.0))
    one.set_budget(budget(9.0))
    with other.charge(calibrated(1.0), budget(9.0)) as finish:
        finish("cd" * 32)
    assert len(one.all_entries()) == len(other.all_entries()) == 2
    assert len(third.all_entries()) == 1
    assert one.spent(DELTA, "add-or-remove") == pytest.approx(other.spent(DELTA, "add-or-remove")) != 1.0


def test_a_release_by_units_counts_double_for_one_record(tmp_path: Path) -> None:
    """A unit of one record at v, which is joined by one at -3 v, has the mean -v: a change by 2 C."""
    own, other = (Ledger.of(tmp_path, name) for name in ("own", "other"))
    released(own)
    released(other, unit_column="person")
    assert [each.clipping_norm for each in own.stated_releases(None)] == [2.0, 1.0]  # "other" is first by name
    assert [each.clipping_norm for each in own.stated_releases("person")] == [1.0]


@pytest.mark.parametrize("place", ["folder", "object store"])
def test_data_are_judged_before_they_are_counted(tmp_path: Path, place: str) -> None:
    root = tmp_path if place == "folder" else location(f"memory://{uuid4().hex}")
    one, other = (Ledger.of(root, name) for name in ("one", "other"))
    assert len(one.digests(["a", "b"])) == 0
    one.count_records(["a", "b"], ["ann"])
    one.set_budget(budget(1.0))
    with one.charge(calibrated(1.0), budget(9.0)) as finish:
        finish(DIGEST)
    for texts, units in ((["B ", "c"], ()), (["c"], ["ann"])):
        with pytest.raises(BudgetExhausted, match=f"budget of 1 of {one.name}"):
            other.check(budget(9.0), calibrated(1.0), uncounted=other.digests(texts, units))
        with pytest.raises(BudgetExhausted, match=f"budget of 1 of {one.name}"):
            other.count_records(texts, units, (budget(9.0), calibrated(1.0)))
    other.check(budget(1.0), calibrated(1.0), uncounted=other.digests(["c"], ["bob"]))
    assert not other.rows.read(other.name).size
    assert other.related() == [other]


def test_a_person_in_two_data_sets_has_one_budget(tmp_path: Path) -> None:
    january, february = (Ledger.of(tmp_path, name) for name in ("january", "february"))
    january.count_records(["warm soup", "rude staff"], ["ann", "bob"])
    february.count_records(["a quiet room"], ["bob"])
    with january.charge(calibrated(1.0), budget(1.0)) as finish:
        finish(DIGEST)
    assert february.spent(DELTA, "add-or-remove") == pytest.approx(1.0)
    with pytest.raises(BudgetExhausted):
        february.check(budget(1.0), calibrated(1.0))


def test_a_copy_that_is_counted_while_the_original_is_released_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_store, "LOCK_SECONDS", 5.0)
    original, copy = (Ledger.of(tmp_path, name) for name in ("original", "copy"))
    locked = threading.Event()

    def release_the_copy() -> None:
        locked.wait()
        copy.count_records(["warm soup"])
        with copy.lock():  # takes its own first, by name, and waits for the original's
            released(copy, "cd" * 32)

    original.count_records(["warm soup"])
    with ThreadPoolExecutor(1) as pool:
        with original.lock():
            locked.set()
            waits = pool.submit(release_the_copy)
            while not copy.rows.read(copy.name).size:
                time.sleep(0.01)
            time.sleep(0.2)
            released(original)
            assert not copy.entries()
        waits.result()
    assert [len(ledger.all_entries()) for ledger in (original, copy)] == [2, 2]


def test_a_ledger_where_nothing_can_be_written_is_read(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    released(ledger)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("gradmm.privacy.ledger_store.FileLock.acquire", read_only)
    assert [entry.sha256 for entry in ledger.entries()] == [DIGEST]
    with pytest.raises(InputError, match="cannot be written"):
        released(ledger)


def test_an_unfinished_release_is_charged(ledger: Ledger) -> None:
    with pytest.raises(KeyboardInterrupt), ledger.charge(release(), budget(1.0)):
        raise KeyboardInterrupt
    assert [entry.sha256 for entry in ledger.entries()] == [None]
    alone, both = (composed_epsilon([release()] * n, DELTA, "add-or-remove") for n in (1, 2))
    assert ledger.spent(DELTA, "add-or-remove") == alone
    with pytest.raises(InputError, match="1 release so far"):
        ledger.check(budget((alone + both) / 2), release())
    assert ledger.find("k1") is None


def test_no_noise_is_drawn_before_the_intent_is_on_disk(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: list[int] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        sync(descriptor)
        on_disk.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", record)
    with ledger.charge(release(), budget(1.0)):
        assert on_disk == [place.stat().st_ino for place in (ledger.file, *ledger.file.parents[:2])]

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InputError, match="No space left"), ledger.charge(release(), budget(1.0)):
        pytest.fail("charged")


def test_one_charge_pays_for_one_artifact(ledger: Ledger) -> None:
    with ledger.charge(release(), budget(1.0)) as finish:
        finish(DIGEST)
        with pytest.raises(ValueError, match="was already finished"):
            finish("cd" * 32)
    assert [entry.sha256 for entry in ledger.entries()] == [DIGEST]


def test_the_newest_finished_release_of_a_key_is_found(ledger: Ledger) -> None:
    released(ledger, "1" * 64)
    released(ledger, "2" * 64)
    released(ledger, "3" * 64, stage_key="k2")
    with ledger.charge(release(), budget(100.0)):
        pass
    found = ledger.find("k1")
    assert found is not None
    assert found.sha256 == "2" * 64
    assert ledger.find("k3") is None


def test_an_artifact_published_before_a_crash_is_adopted_once(ledger: Ledger) -> None:
    assert ledger.adopt("k1", DIGEST) is None
    released(ledger, "1" * 64)
    with ledger.charge(release(), budget(100.0)):
        pass
    known = ledger.adopt("k1", "1" * 64)  # the older artifact: the crash came before the newer one was published
    assert known == ledger.entries()[0]
    assert ledger.entries()[1].sha256 is None
    adopted = ledger.adopt("k1", DIGEST)
    assert adopted == ledger.entries()[1] == ledger.find("k1") == ledger.adopt("k1", DIGEST)
    assert adopted is not None
    assert adopted.sha256 == DIGEST
    assert ledger.adopt("k1", "4" * 64) is None  # nobody paid for this one
    assert len(ledger.entries()) == 2


# The file


def test_data_sets_have_different_ledger_names(tmp_path: Path) -> None:
    name = Ledger.of(tmp_path, "stanfordnlp/sst2").file.relative_to(str(tmp_path))
    assert str(name) == f"ledger/stanfordnlp-sst2-{hashlib.sha256(b'stanfordnlp/sst2').hexdigest()[:8]}.jsonl"
    identities = ["a/b", "a-b", "A/B", "é", "ü", "x" * 300, "x" * 301]
    files = {Ledger.of(tmp_path, identity).file for identity in identities}
    assert len(files) == len(identities)
    assert all(len(file.name) < 100 and file.parent == tmp_path / "ledger" for file in files)


def test_the_ledger_is_accessible_to_its_owner_only(ledger: Ledger) -> None:
    old = os.umask(0o022)
    try:
        released(ledger)
    finally:
        os.umask(old)
    folder = ledger.file.parent
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in [folder, *folder.iterdir()]}
    assert modes == {"ledger": 0o700, ledger.file.name: 0o600, f"{ledger.file.name}.lock": 0o600}


def test_a_truncated_last_line_is_dropped_wherever_it_ends(ledger: Ledger) -> None:
    released(ledger)
    kept, sound = ledger.entries(), ledger.file.read_bytes()
    with ledger.charge(release(), budget(1.0)):
        pass
    torn = ledger.file.read_bytes()
    for end in range(len(sound), len(torn) + 1):
        ledger.file.write_bytes(torn[:end])
        # If only the newline is missing, the line may be a complete release.
        whole = end >= len(torn) - 1
        assert len(ledger.entries()) == len(kept) + whole
    for end in (len(sound), len(sound) + 1, len(torn) - 2, len(torn) - 1):
        ledger.file.write_bytes(torn[:end])
        released(ledger)
        content = ledger.file.read_bytes()
        assert content.startswith(torn if end == len(torn) - 1 else sound)
        assert len(ledger.entries()) == len(kept) + 1 + (end == len(torn) - 1)
        assert content.count(b"\n") == 4 + (end == len(torn) - 1)


def assert_damaged(ledger: Ledger, content: bytes) -> None:
    ledger.file.write_bytes(content)
    with pytest.raises(
        InputError, match="is damaged, or was edited; restore it from a backup; nothing was"
    ) as told:
        ledger.entries()
    assert told.value.where == str(ledger.file)


def test_a_flipped_bit_anywhere_is_found(ledger: Ledger) -> None:
    released(ledger)
    with ledger.charge(release(), budget(1.0)):
        pass
    content = ledger.file.read_bytes()
    for place, byte in enumerate(content):
        for bit in range(8) if byte == ord("\n") else [place % 8]:
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            assert_damaged(ledger, bytes(flipped))
    with pytest.raises(InputError), ledger.charge(release(), budget(1.0)):
        pytest.fail("charged")


def test_a_removed_moved_or_edited_line_is_found(ledger: Ledger) -> None:
    for _ in range(2):
        released(ledger)
    first, second, third, fourth = ledger.file.read_bytes().splitlines(keepends=True)
    assert_damaged(ledger, first + second + fourth)
    assert_damaged(ledger, second + third + fourth)
    assert_damaged(ledger, third + fourth)
    assert_damaged(ledger, first + third + second + fourth)
    assert_damaged(ledger, first + second + third + fourth + fourth)
    assert_damaged(ledger, (first + second + third + fourth).replace(b'"sigma": 100.0', b'"sigma": 900.0', 1))
    assert_damaged(ledger, first + b"\n" + second)
    assert_damaged(ledger, b"[]\n" + first)


# The lock


def test_the_lock_is_reentrant(ledger: Ledger) -> None:
    with ledger.lock(), ledger.lock(), Ledger(ledger.file).lock():
        assert ledger.find("k1") is None
        released(ledger)
    assert len(ledger.entries()) == 1


def test_the_lock_is_held_from_the_check_to_the_end_of_a_charge(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_store, "LOCK_SECONDS", 0.05)
    told = r"jsonl\.lock: another run has been releasing by this ledger for 0\.05 s; wait for it"
    with ThreadPoolExecutor(1) as other_thread:

        def refused_elsewhere(*_: object) -> float:
            with pytest.raises(InputError, match=told):
                other_thread.submit(ledger.adopt, "k1", DIGEST).result()
            return 0.5

        monkeypatch.setattr(ledger_module, "composed_epsilon", refused_elsewhere)
        with ledger.charge(release(), budget(1.0)) as finish:
            refused_elsewhere()
            finish(DIGEST)
            refused_elsewhere()
        assert len(other_thread.submit(ledger.entries).result()) == 1


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("")
    with pytest.raises(InputError, match="the privacy ledger cannot be written"):
        Ledger.of(tmp_path, "data").adopt("k1", DIGEST)


# Processes


# Forks for every line it is sent, so that modules are imported once. Prints the fork's id, then its exit status.
RELEASER = """
import hashlib, os, sys, time
from pathlib import Path
import dp_accounting.gaussian_mechanism  # as the first charge would
from gradmm.errors import InputError
from gradmm.privacy.ledger import Budget, Ledger, Release

ledger, folder = Ledger(Path(sys.argv[1])), Path(sys.argv[2])
release, epsilon, rounds = Release.model_validate_json(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
budget = Budget(epsilon=epsilon, delta=release.delta, adjacency=release.adjacency)

def work():
    for _ in range(rounds):
        try:
            with ledger.charge(release, budget) as finish:
                noise = os.urandom(64)
                digest = hashlib.sha256(noise).hexdigest()
                (folder / digest).write_bytes(noise)
                time.sleep(0.01)  # widens the window for a kill
                finish(digest)
        except InputError as error:
            assert error.where == "privacy.budget_epsilon", error

print("ready", flush=True)
for _ in sys.stdin:
    fork = os.fork()
    if fork == 0:
        work()
        os._exit(0)
    print(fork, flush=True)
    print(os.waitpid(fork, 0)[1], flush=True)
"""


class Releaser:
    """A process that charges, draws and publishes one release after another for every call of `go`."""

    def __init__(self, ledger: Ledger, folder: Path, epsilon: float, rounds: int) -> None:
        folder.mkdir()
        arguments = [str(ledger.file), str(folder), release().model_dump_json(), str(epsilon), str(rounds)]
        command = [sys.executable, "-c", RELEASER, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout

    def go(self) -> int:
        print(file=self.process.stdin, flush=True)
        return self.told()

    def told(self) -> int:
        return int(self.said.readline())

    def __enter__(self) -> Releaser:
        assert self.said.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=60)


def test_two_processes_that_race_for_a_budget_share_it_exactly(ledger: Ledger, tmp_path: Path) -> None:
    fits = 47
    epsilon = composed_epsilon([release()] * fits, DELTA, "add-or-remove") * 1.001
    assert epsilon < composed_epsilon([release()] * (fits + 1), DELTA, "add-or-remove")
    one, other = (Releaser(ledger, tmp_path / name, epsilon, rounds=50) for name in ("one", "other"))
    with one, other:
        one.go()
        other.go()
        assert (one.told(), other.told()) == (0, 0)
    published = {file.name for name in ("one", "other") for file in (tmp_path / name).iterdir()}
    assert len(published) == fits
    assert sorted(published) == sorted(entry.sha256 or "" for entry in ledger.entries())


def test_what_is_published_before_a_kill_is_never_left_uncounted(ledger: Ledger, tmp_path: Path) -> None:
    moments, kills = random.Random(1), 0
    entries, published = [], set()
    with Releaser(ledger, tmp_path / "artifacts", epsilon=1e6, rounds=10**9) as releaser:
        while kills < 20 or len(published) <= 20:
            worker = releaser.go()
            time.sleep(moments.uniform(0.0, 0.15))
            os.kill(worker, signal.SIGKILL)
            kills += 1
            assert releaser.told() == signal.SIGKILL
            before, entries = entries, ledger.entries()
            assert entries[: len(before)] == before
            new = {file.name for file in (tmp_path / "artifacts").iterdir()} - published
            published |= new
            charged = [entry.sha256 for entry in entries[len(before) :]]
            assert len(charged) >= len(new)
            assert set(charged) - {None} <= new
            assert None not in charged[:-1]  # a release begins only after the previous one ended or was killed
    assert any(entry.sha256 is None for entry in entries), "no kill came inside a charge, so nothing was tested"
