"""The demo's data and model, built as the demo builds them: training takes a minute."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradmm.demo import material
from gradmm.demo.grammar import EXEMPLARS, SUFFIX, VERBALISERS
from gradmm.demo.material import DemoMaterial, build_demo

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


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


def test_the_data_are_three_splits_without_a_common_text(demo: DemoMaterial) -> None:
    splits = {split: pd.read_parquet(demo.data / f"{split}.parquet") for split in material.SPLITS}
    assert {split: len(rows) for split, rows in splits.items()} == material.SPLITS
    together = pd.concat(splits.values())
    assert list(together.columns) == ["text", "label"]
    assert together["label"].dtype == "int64"
    assert together["text"].is_unique
    assert all(set(rows["label"]) == {0, 1} for rows in splits.values())


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
