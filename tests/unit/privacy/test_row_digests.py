from __future__ import annotations

import stat
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import UInt64

from gradmm.errors import InputError
from gradmm.privacy.row_digests import RowDigests
from gradmm.storage.location import Location, location

TEXTS = ("warm soup", "rude staff", "a quiet room")


@pytest.fixture(params=["folder", "object store"])
def digests(request: pytest.FixtureRequest, tmp_path: Path) -> RowDigests:
    place: Location = tmp_path if request.param == "folder" else location(f"memory://{uuid4().hex}")
    return RowDigests(place / "ledger")


def test_digests_are_those_of_the_texts_in_any_order_and_without_repetitions(digests: RowDigests) -> None:
    once = digests.of(TEXTS)
    assert len(once) == 3
    assert np.array_equal(once, digests.of((*reversed(TEXTS), TEXTS[0])))
    assert not set(once) & set(digests.of(("Warm soups", "")))


def test_a_text_is_recognised_without_regard_to_case_white_space_and_forms_of_unicode(digests: RowDigests) -> None:
    digests.add("a", digests.of(("Warm soup at the café",)))
    digests.add("b", digests.of(("warm  SOUP\nat the cafe\u0301",)))
    digests.add("c", digests.of(("Warm soup at the cafe",)))
    assert digests.related("a") == ["b"]


def test_data_are_related_if_they_share_a_unit(digests: RowDigests) -> None:
    digests.add("january", digests.of(("warm soup", "rude staff"), ("ann", "bob")))
    digests.add("february", digests.of(("a quiet room",), ("bob",)))
    digests.add("march", digests.of(("nothing",), ("eve",)))
    digests.add("named", digests.of(("ann", "bob", "eve")))  # a text is no unit
    assert digests.related("january") == ["february"]
    assert digests.related("march") == []


def test_data_are_related_if_they_share_a_record(digests: RowDigests) -> None:
    for name, texts in {"a": TEXTS, "b": (TEXTS[1], "else"), "c": ("else",), "d": ("alone",)}.items():
        digests.add(name, digests.of(texts))
    assert digests.related("a") == ["b"]
    assert digests.related("c") == ["b"]
    assert digests.related("never counted") == []
    digests.add("a", digests.of(("alone",)))  # the data grew
    assert digests.related("a") == ["b", "d"]
    assert len(digests.read("a")) == 4


def test_another_root_has_other_digests(tmp_path: Path) -> None:
    one, other = RowDigests(tmp_path / "one"), RowDigests(tmp_path / "other")
    assert not set(one.of(TEXTS)) & set(other.of(TEXTS))
    assert np.array_equal(one.of(TEXTS), RowDigests(tmp_path / "one").of(TEXTS))


def test_runs_that_begin_together_use_one_key(digests: RowDigests) -> None:
    with ThreadPoolExecutor(8) as pool:
        every = list(pool.map(lambda _: digests.of(TEXTS).tolist(), range(16)))
    assert all(each == every[0] for each in every)


def test_key_and_digests_are_their_owners_alone_and_leave_nothing_beside(tmp_path: Path) -> None:
    digests = RowDigests(tmp_path / "ledger")
    digests.add("a", digests.of(TEXTS))
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "ledger").iterdir()}
    assert files == {"rows.key": 0o600, "a.rows": 0o600}
    assert not any(text.encode() in (tmp_path / "ledger" / "a.rows").read_bytes() for text in TEXTS)


def test_damaged_digests_are_told(tmp_path: Path) -> None:
    digests = RowDigests(tmp_path)
    digests.add("a", digests.of(TEXTS))
    file = tmp_path / "a.rows"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"a\.rows: is damaged"):
        digests.related("b")


def test_digests_without_their_key_are_refused(digests: RowDigests) -> None:
    digests.add("a", digests.of(TEXTS))
    (digests.folder / "rows.key").unlink()
    with pytest.raises(InputError, match=r"rows\.key: is missing"):
        digests.of(TEXTS)


def test_runs_that_count_other_data_at_once_in_a_store_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = RowDigests(location(f"memory://{uuid4().hex}") / "ledger")
    one, other = (digests.of((text,)) for text in TEXTS[:2])
    read = RowDigests.read

    def overtaken(self: RowDigests, ledger: str) -> UInt64[np.ndarray, " different"]:
        known = read(self, ledger)
        monkeypatch.setattr(RowDigests, "read", read)
        self.add(ledger, other)
        return known

    monkeypatch.setattr(RowDigests, "read", overtaken)
    digests.add("a", one)
    assert np.array_equal(digests.read("a"), np.union1d(one, other))


@given(one=st.sets(st.text(max_size=5)), other=st.sets(st.text(max_size=5)))
def test_data_are_related_exactly_if_their_texts_intersect(
    tmp_path_factory: pytest.TempPathFactory, one: set[str], other: set[str]
) -> None:
    digests = RowDigests(tmp_path_factory.mktemp("rows"))
    digests.add("one", digests.of(sorted(one)))
    digests.add("other", digests.of(sorted(other)))
    one, other = (
        {" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts}
        for texts in (one, other)
    )
    assert digests.related("one") == (["other"] if one & other else [])
