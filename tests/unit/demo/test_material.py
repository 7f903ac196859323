"""The demo's grammar and the material built from it."""

import itertools
import random
import re
from pathlib import Path

import pytest

from gradmm.demo import material
from gradmm.demo.grammar import (
    DOMAINS,
    EXEMPLARS,
    INSTRUCTIONS,
    MAX_WORDS,
    MIN_WORDS,
    PRIVATE,
    PUBLIC,
    SENTENCES,
    VERBALISERS,
    Writer,
    exchange,
    private_rows,
    public_documents,
)
from gradmm.demo.material import DemoMaterial, build_demo
from gradmm.errors import InputError


def words_of_text(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


# --- The grammar ----------------------------------------------------------------------------------------


def test_the_same_seed_writes_the_same_texts() -> None:
    first, second = (private_rows(200, random.Random(7)) for _ in range(2))
    assert first == second
    assert first != private_rows(200, random.Random(8))
    first, second = (list(public_documents(50, random.Random(7), frozenset())) for _ in range(2))
    assert first == second


def test_private_rows_are_different_texts_of_both_classes() -> None:
    rows = private_rows(3000, random.Random(1))
    assert len({text for text, _ in rows}) == len(rows) == 3000
    assert {label for _, label in rows} == {0, 1}
    assert abs(sum(label for _, label in rows) - 1500) < 100


@pytest.mark.parametrize("habits", [PUBLIC, PRIVATE])
def test_texts_are_varied_sentences_of_bounded_length(habits) -> None:
    writer = Writer(habits, random.Random(2))
    texts = [writer.write(number % 2) for number in range(3000)]
    assert all(MIN_WORDS <= len(text.split()) <= MAX_WORDS for text in texts)
    assert all(re.fullmatch(r"[A-Z][\w ,:]+\.", text) for text in texts)
    assert len(set(texts)) > 2700
    assert len(set(itertools.chain.from_iterable(map(words_of_text, texts)))) > 600


def test_every_symbol_of_every_rule_can_be_written() -> None:
    writer = Writer(PRIVATE, random.Random(3))
    for domain, pattern in itertools.product(DOMAINS, itertools.chain.from_iterable(SENTENCES.values())):
        for _ in range(5):
            assert "{" not in writer._expand(pattern, domain)
            assert "{" not in writer._expand(exchange(pattern), domain)


def test_exchange_is_its_own_inverse() -> None:
    assert exchange("{bad.is} but {good.is}") == "{good.is} but {bad.is}"
    for pattern in itertools.chain.from_iterable(SENTENCES.values()):
        assert exchange(pattern) != pattern
        assert exchange(exchange(pattern)) == pattern


def test_articles_fit_the_next_word() -> None:
    writer = Writer(PRIVATE, random.Random(4))
    texts = " ".join(writer.write(number % 2) for number in range(5000))
    assert re.search(r"\ban [aeiou]", texts)
    assert not re.search(r"\ba (?!useless)[aeiou]", texts)
    assert not re.search(r"\ban (?!hon|hour)[^aeiou]", texts)


def test_no_text_uses_the_template() -> None:
    assert not any("It was" in text for text, _ in private_rows(3000, random.Random(5)))


def test_public_documents_hold_no_private_text() -> None:
    forbidden = frozenset(text for text, _ in private_rows(3000, random.Random(6)))
    # Without the restriction, public writers with this seed write these texts.
    written = "\n".join(public_documents(2000, random.Random(6), frozenset()))
    forbidden |= frozenset(re.findall(r"[A-Z][\w ,:]+\.", written)[::10])
    documents = "\n".join(public_documents(2000, random.Random(6), forbidden))
    assert not [text for text in forbidden if text in documents]


def test_exemplars_are_balanced_and_verbalisers_differ() -> None:
    assert sorted(label for _, label in EXEMPLARS) == [0, 0, 0, 1, 1, 1]
    assert set(INSTRUCTIONS) == set(VERBALISERS) == {0, 1}
    assert len(set(VERBALISERS.values())) == 2


# --- The folder ----------------------------------------------------------------------------------------


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Write two small files instead of the material; return the folders written so far."""
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "train.parquet").write_text("data")
        marker = {"generator": material.generator_digest(), "files": material.digests_of(folder)}
        (folder / material.MARKER).write_text(material.json.dumps(marker))

    monkeypatch.setattr(material, "write_material", write)
    return written


def test_a_complete_folder_is_not_rebuilt(tmp_path: Path, quick_build: list[Path]) -> None:
    folder = tmp_path / "deep" / "demo"
    assert build_demo(folder) == build_demo(folder) == DemoMaterial(folder / "data", folder / "model")
    assert len(quick_build) == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_only_a_build_is_announced(
    tmp_path: Path, quick_build: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gradmm.demo.material")
    build_demo(tmp_path / "demo")
    (line,) = caplog.messages
    assert line.startswith("demo: ")
    build_demo(tmp_path / "demo")
    assert caplog.messages == [line]


def test_a_damaged_or_outdated_folder_is_rebuilt(
    tmp_path: Path, quick_build: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_demo(tmp_path / "demo")
    (tmp_path / "demo" / "data" / "train.parquet").write_text("damage")
    build_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "data" / "train.parquet").read_text() == "data"
    monkeypatch.setattr(material, "generator_digest", lambda: "newer")
    build_demo(tmp_path / "demo")
    assert len(quick_build) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_folder_of_something_else_is_refused(tmp_path: Path, quick_build: list[Path]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="other than a demo"):
        build_demo(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert not quick_build


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(material, "write_material", write)
    with pytest.raises(KeyboardInterrupt):
        build_demo(tmp_path / "demo")
    assert not list(tmp_path.iterdir())


def test_a_folder_finished_by_another_process_is_kept(
    tmp_path: Path, quick_build: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = material.write_material

    def write_while_another_finishes(folder: Path) -> None:
        write(folder)
        write(tmp_path / "demo")
        (tmp_path / "demo" / "data").touch()

    monkeypatch.setattr(material, "write_material", write_while_another_finishes)
    build_demo(tmp_path / "demo")
    assert quick_build[-1] == tmp_path / "demo"
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_an_empty_folder_is_filled(tmp_path: Path, quick_build: list[Path]) -> None:
    build_demo(tmp_path)
    assert (tmp_path / "data" / "train.parquet").exists()
