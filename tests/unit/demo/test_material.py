"""The demo's grammar and the material built from it."""

import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    SUFFIX,
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


# --- The whole material ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DemoMaterial:
    """The real material, kept in pytest's cache: training takes most of a minute."""
    cached = request.config.pluginmanager.has_plugin("cacheprovider")
    folder = request.config.cache.mkdir("demo") if cached else tmp_path_factory.mktemp("demo")
    torch.manual_seed(0)
    state = torch.get_rng_state()
    built = build_demo(folder)
    assert torch.equal(torch.get_rng_state(), state)
    return built


class Classifier:
    """Classification by the demo's model and verbalisers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.responses = torch.tensor([self.tokenizer(VERBALISERS[label])["input_ids"][0] for label in (0, 1)])

    def logits(self, prompts: list[str]) -> torch.Tensor:
        """Compute next-token logits (prompts x vocabulary)."""
        ids = self.tokenizer(prompts)["input_ids"]
        last = torch.tensor([len(row) - 1 for row in ids])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
        states = self.model.model(input_ids=padded).last_hidden_state
        return self.model.lm_head(states[torch.arange(len(ids)), last])

    @torch.no_grad()
    def accuracy(self, rows: pd.DataFrame, prefix: str = "") -> float:
        logits = self.logits([prefix + text + SUFFIX for text in rows["text"]])[:, self.responses]
        return (logits.argmax(dim=1).numpy() == rows["label"]).mean()

    def fine_tune(self, rows: pd.DataFrame, steps: int = 200, batch: int = 16, rate: float = 3e-4) -> None:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
            drawn = rows.sample(batch, random_state=step)
            logits = self.logits([text + SUFFIX for text in drawn["text"]])
            expected = self.responses[torch.tensor(drawn["label"].to_numpy())]
            torch.nn.functional.cross_entropy(logits, expected).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_the_data_are_three_splits_without_a_common_text(demo: DemoMaterial) -> None:
    splits = {split: pd.read_parquet(demo.data / f"{split}.parquet") for split in material.SPLITS}
    assert {split: len(rows) for split, rows in splits.items()} == material.SPLITS
    together = pd.concat(splits.values())
    assert list(together.columns) == ["text", "label"]
    assert together["label"].dtype == "int64"
    assert together["text"].is_unique
    assert all(set(rows["label"]) == {0, 1} for rows in splits.values())


@pytest.mark.slow
def test_the_model_folder_loads_with_single_token_verbalisers(demo: DemoMaterial) -> None:
    names = {path.name for path in demo.model.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    classifier = Classifier(demo.model)
    tokenizer, config = classifier.tokenizer, classifier.model.config
    assert config.architectures == ["PhiForCausalLM"]
    assert not config.tie_word_embeddings
    assert classifier.model.lm_head.bias is not None
    assert config.bos_token_id == config.eos_token_id == config.pad_token_id == 0
    assert tokenizer.convert_ids_to_tokens(0) == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) == config.vocab_size
    assert all(len(tokenizer(word)["input_ids"]) == 1 for word in VERBALISERS.values())
    for text, label in EXEMPLARS:
        ids = tokenizer(text + SUFFIX + VERBALISERS[label])["input_ids"]
        assert ids == [i for part in (text, SUFFIX, VERBALISERS[label]) for i in tokenizer(part)["input_ids"]]
        assert tokenizer.decode(ids) == text + SUFFIX + VERBALISERS[label]


@pytest.mark.slow
def test_a_second_call_builds_nothing_and_imports_no_torch(demo: DemoMaterial) -> None:
    assert build_demo(demo.data.parent) == demo
    program = (
        "import sys; from pathlib import Path; from gradmm.demo.material import build_demo;"
        "build_demo(Path(sys.argv[1])); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    root = Path(material.__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program, str(demo.data.parent)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_the_task_is_learnable_from_little_data_and_not_known_in_advance(demo: DemoMaterial) -> None:
    train, test = (pd.read_parquet(demo.data / f"{split}.parquet") for split in ("train", "test"))
    classifier = Classifier(demo.model)
    before = classifier.accuracy(test)
    shots = "".join(f"{text}{SUFFIX}{VERBALISERS[label]}\n" for text, label in EXEMPLARS)
    assert classifier.accuracy(test, prefix=shots) > 0.58
    classifier.fine_tune(train.groupby("label").sample(50, random_state=0))
    after = classifier.accuracy(test)
    assert 0.5 < before < 0.78
    assert after > 0.76
    assert after > before + 0.06
