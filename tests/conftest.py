"""Hypothesis profiles, and tiny random models of several families."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Unit tests log outside flows, where Prefect's handler, if another tier imports it, has no run to send to.
os.environ["PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW"] = "ignore"

import absl.logging
import jaxtyping
import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from gradmm.config.settings import ModelSettings
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.model_reference import ModelReference, resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_template
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.target.features import TextFeatures, text_means
from gradmm.target.probe import Probe

# The models of most tests are so small that a second thread only waits for the first.
torch.set_num_threads(1)

# Prefect's logging set-up closes the streams of existing handlers. Otherwise absl's (imported by dp-accounting)
# would be the stream that pytest captures with.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)

#: Examples per Hypothesis test, by profile. The environment variable HYPOTHESIS_PROFILE chooses one.
EXAMPLES = {"quick": 25, "nightly": 100}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
for name, number in EXAMPLES.items():
    settings.register_profile(name, max_examples=number, deadline=None)  # machines are sometimes busy
settings.load_profile(PROFILE)

#: Services of a Prefect server that no test asks for in these tiers.
UNUSED_SERVICES = (
    "CANCELLATION_CLEANUP",
    "EVENT_PERSISTER",
    "FOREMAN",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "SCHEDULER",
    "TASK_RUN_RECORDER",
    "TRIGGERS",
)

WORDS = (
    "the soup was warm and the bread was fresh . a quiet room with good light and bad chairs . "
    "they said it was great but the train came late again ! we liked every page of this book , it was good . "
    "never again : cold coffee , rude staff , a terrible smell . It was good . It was bad . It was great . "
)


def examples(nightly: int, **options: Any) -> settings:
    """Hypothesis settings for `nightly` examples in the nightly profile, otherwise a quarter of them."""
    quick = max(nightly // 4, min(nightly, EXAMPLES["quick"]))
    return settings(max_examples=nightly if PROFILE == "nightly" else quick, **options)


def make_mechanism(epsilon: float = 1.0, **changes: object) -> GaussianMechanism:
    """Make a mechanism; `changes` replace the values below."""
    values = {
        "epsilon": epsilon,
        "delta": 1e-5,
        "clipping_norm": 1.0,
        "adjacency": "add-or-remove",
        "calibration": "analytic",
    }
    return GaussianMechanism.model_validate(values | changes)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's folder, which all xdist workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def built_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Build `folder` unless another xdist worker of the session has built it."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def session_server(migrated_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server for each xdist worker: one for all was seen to stall for a minute on a locked database.

    It has no services for schedules, triggers, events and task runs, and gets no events: they take a third of the
    tests' time. A server that `gradmm serve` starts has them. Its address is returned.
    """
    # Imported here: the unit tests need no Prefect.
    from prefect.events import utilities as events
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing import utilities

    folder = tmp_path_factory.mktemp("session-server")
    shutil.copy(migrated_database, folder / "prefect-test.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", lambda: str(folder))
        patch.setattr(events, "should_emit_events", lambda: False)
        for service in UNUSED_SERVICES:
            patch.setenv(f"PREFECT_SERVER_SERVICES_{service}_ENABLED", "false")
        with (
            utilities.prefect_test_harness(server_startup_timeout=120),
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        ):
            yield str(PREFECT_API_URL.value())


@pytest.fixture(scope="session")
def migrated_database(shared_folder: Path) -> Path:
    """An empty database of Prefect: it takes a server seconds to make one."""

    def migrate(folder: Path) -> None:
        program = "from gradmm.deployments.serving.server_process import migrate_database; migrate_database()"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {"PREFECT_HOME": str(folder)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)

    return built_once(shared_folder / "migrated", migrate) / "prefect.db"


def prefect_home(folder: Path, migrated_database: Path) -> dict[str, str]:
    """Make a new home for Prefect in `folder`; return its environment variable."""
    folder.mkdir()
    shutil.copy(migrated_database, folder)
    return {"PREFECT_HOME": str(folder)}


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of real data sets and models; tests that need it skip where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "material"
    folder = Path(os.environ.get("GRADMM_MATERIAL", beside))
    if not folder.is_dir():
        pytest.skip(f"no material at {folder}; set GRADMM_MATERIAL to its folder")
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 400 tokens; <|endoftext|> is token 0."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def tiny_config(family: str, vocab_size: int, **changes: object) -> PretrainedConfig:
    """A two-layer configuration of a model family, 32 wide."""
    sizes = {
        "phi": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        "llama": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
        "gpt_neox": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
        "opt": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "word_embed_proj_dim": 16,
        },
        "phi3": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 16,
            # Beyond 16 positions of the padded input, all rotary factors change.
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 16,
            },
        },
        "mixtral": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 64,
            "num_local_experts": 4,
        },
        "gemma2": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
        },
    }
    common = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return AutoConfig.for_model(family, **common | sizes[family] | changes)


def tiny_language_model(
    tokenizer: PreTrainedTokenizerFast,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **changes: object,
) -> LanguageModel:
    """Random weights, larger than usual so that nothing is near zero. Eager attention, for double backward."""
    config = tiny_config(family, len(tokenizer) + 3, **changes)  # Phi too has more rows than tokens
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return LanguageModel(model.to(dtype).eval().requires_grad_(False), tokenizer)


@pytest.fixture(scope="session")
def phi(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """A tiny Phi (untied, a head with bias) in float64."""
    return tiny_language_model(tokenizer, "phi")


def random_probe(language_model: LanguageModel, template: TokenisedTemplate) -> Probe:
    """A probe with an opinion of every text, of hidden states of random tokens."""
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(3, language_model.embeddings.shape[0] - 3, (20, 6), generator=random)
    ids = ids.to(language_model.device)
    public = text_means(language_model.layers(input_ids=ids), torch.ones_like(ids, dtype=torch.bool))
    features = TextFeatures.of_public(public, 5)
    weights = 3 * torch.randn(5, len(template.labels), generator=random, dtype=torch.float64)
    return Probe(features, template.labels, weights, torch.zeros(len(template.labels)), 1.0)


@pytest.fixture(scope="session")
def prompt_template() -> PromptTemplate:
    return PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " good"}, max_text_tokens=64)


@pytest.fixture(scope="session")
def template(phi: LanguageModel, prompt_template: PromptTemplate) -> TokenisedTemplate:
    return tokenise_template(phi, prompt_template)


@pytest.fixture(scope="session")
def tiny_model(tokenizer: PreTrainedTokenizerFast, shared_folder: Path) -> ModelReference:
    """The tiny Phi as a folder, in float32."""

    def build(folder: Path) -> None:
        tiny_language_model(tokenizer, "phi", dtype=torch.float32).model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return resolve_model(ModelSettings(name=str(built_once(shared_folder / "tiny-phi", build))))


#: Files that take minutes. Workers take files in order: a long one begun last would leave the others idle.
LONG_FILES = (
    "test_shard_runners",
    "test_deployments",
    "test_compare",
    "test_studies",
    "test_surroundings",
    "test_s3_root",
    "test_material",
    "test_run_server",
    "test_installed_wheel",
    "test_cli",
    "test_privacy",
    "test_ui_artifacts",
    "test_demo_material",
)


#: Tests of which a case has been set up.
_seen: set[str] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the shapes of arrays in the first case of each test only, which saves a third of the unit tier's time.

    The nightly tests check them in all cases.
    """
    test = item.nodeid.partition("[")[0]
    jaxtyping.config.update("jaxtyping_disable", test in _seen and PROFILE != "nightly")
    _seen.add(test)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files."""
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)
