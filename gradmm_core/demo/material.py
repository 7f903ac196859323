"""The demo's files: a private data set written by the grammar, and a tiny language model of public text.

Building takes almost a minute, so the files are kept. A marker in the folder holds the digests of the files and of
the code that wrote them. If the folder is complete, this module imports neither torch nor transformers.
"""

import hashlib
import json
import logging
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradmm.demo.grammar import SUFFIX, VERBALISERS, private_rows, public_documents, public_texts
from gradmm.errors import InputError
from gradmm.threads import limit_threads

if TYPE_CHECKING:
    import torch
    import transformers

logger = logging.getLogger(__name__)

SEED = 20250713
SPLITS = {"train": 2000, "validation": 400, "test": 600}  # rows
END = "<|endoftext|>"
MARKER = "demo.json"

VOCABULARY = 2048  # maximum tokens; almost every word is a single one
HIDDEN, LAYERS, HEADS, CONTEXT = 96, 2, 4, 512
DOCUMENTS = 36_000
BLOCK, BATCH = 128, 8  # tokens per training block, blocks per step
POSITIVE_SHARE = 0.78  # zero-shot predictions on balanced public texts
THREADS = 2  # more are slower for this model, and sum in another order
LEARNING_RATE, WARM_UP = 5e-3, 50  # peak, steps until the peak


@dataclass(frozen=True)
class DemoMaterial:
    """Paths of the demo's files.

    Attributes:
        data: a folder with `train.parquet`, `validation.parquet` and `test.parquet`. Columns: `text` (string) and
            `label` (int64: 0 negative, 1 positive).
        model: a Hugging Face folder with a `PhiForCausalLM` and its tokenizer.
    """

    data: Path
    model: Path


def build_demo(folder: Path) -> DemoMaterial:
    """Write the demo's data and model to `folder` unless they exist already.

    The folder is created atomically. The texts depend on this code only. The weights are trained on the CPU from a
    fixed seed and also depend on the machine's arithmetic. Global random state is unchanged.

    Args:
        folder: may be missing, empty, or contain an older demo, which is replaced.

    Returns:
        The paths inside `folder`.

    Raises:
        InputError: if the folder contains anything else.
        OSError: if the folder is not writable.
    """
    material = DemoMaterial(data=folder / "data", model=folder / "model")
    if is_complete(folder):
        return material
    if folder.exists() and not (folder / MARKER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("contains something other than a demo", str(folder), "empty it or choose another folder")
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    logger.info("demo: writing its data and training its model, about a minute")
    try:
        write_material(staging)
        put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return material


# --- The folder --------------------------------------------------------------------------------------------


def generator_digest() -> str:
    """Digest the code that determines the contents of the demo's files."""
    sources = (Path(__file__), Path(__file__).with_name("grammar.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digest of every file in the folder except the marker, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARKER)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def is_complete(folder: Path) -> bool:
    """Return whether the folder was written by the current code and no file has changed since."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return False
    return marker == {"generator": generator_digest(), "files": digests_of(folder)}


def put_in_place(staging: Path, folder: Path) -> None:
    """Move the finished `staging` folder to `folder`, unless another process has completed it."""
    if is_complete(folder):
        return
    older = staging.with_suffix(".older")
    if folder.exists():
        os.replace(folder, older)
    try:
        os.replace(staging, folder)
    except OSError:
        if not is_complete(folder):
            raise
    shutil.rmtree(older, ignore_errors=True)


def write_material(folder: Path) -> None:
    """Write all files of the demo to a new `folder`, the marker last."""
    private = private_rows(sum(SPLITS.values()), random.Random(f"private {SEED}"))
    write_splits(private, folder / "data")
    forbidden = frozenset(text for text, _ in private)
    documents = list(public_documents(DOCUMENTS, random.Random(f"public {SEED}"), forbidden))
    write_model(documents, folder / "model")
    marker = {"generator": generator_digest(), "files": digests_of(folder)}
    (folder / MARKER).write_text(json.dumps(marker, indent=1))


def write_splits(rows: list[tuple[str, int]], folder: Path) -> None:
    """Write the rows, in order, to one Parquet file for each of `SPLITS`."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True)
    schema = pyarrow.schema({"text": pyarrow.string(), "label": pyarrow.int64()})
    first = 0
    for split, count in SPLITS.items():
        texts, labels = zip(*rows[first : first + count], strict=True)
        table = pyarrow.table({"text": texts, "label": labels}, schema=schema)
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
        first += count


def write_model(documents: list[str], folder: Path) -> None:
    """Train a tokenizer and a model on the documents and save both to `folder`."""
    import torch
    from transformers.utils import logging

    tokenizer = train_tokenizer(documents)
    for words in (SUFFIX + verbaliser for verbaliser in VERBALISERS.values()):
        assert len(tokenizer.tokenize(words)) == 3, f"{words!r} is not three tokens"
    end = tokenizer.get_vocab()[END]
    blocks = torch.tensor(list(blocks_of(tokenizer(documents)["input_ids"], end)))
    with torch.random.fork_rng(devices=[]), limit_threads(THREADS):
        # CPU only: torch.manual_seed would also seed accelerators, whose state is not forked.
        torch.default_generator.manual_seed(SEED)
        model = train_model(blocks, len(tokenizer), end)
        add_positive_bias(model, tokenizer)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- The model ---------------------------------------------------------------------------------------------


def train_tokenizer(documents: list[str]) -> "transformers.PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer of at most `VOCABULARY` tokens. Token 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )


def blocks_of(documents: list[list[int]], end: int) -> Iterator[list[int]]:
    """Yield blocks of `BLOCK` tokens. Each begins with a document, in every second block after an `end` token.

    The last document of a block is truncated. An incomplete last block is dropped.
    """
    block: list[int] = []
    begins_bare = False
    for document in documents:
        if block or not begins_bare:
            block.append(end)
        block.extend(document)
        if len(block) >= BLOCK:
            yield block[:BLOCK]
            block, begins_bare = [], not begins_bare


def train_model(blocks: "torch.Tensor", vocabulary: int, end: int) -> "transformers.PhiForCausalLM":
    """Train a tiny Phi for one epoch on `blocks` (number x `BLOCK`, token ids), in order."""
    import torch
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.06,  # with the default 0.02, this width learns the classes half as fast
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = PhiForCausalLM(config).train()
    steps = len(blocks) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / (steps - WARM_UP))
    )
    for batch in blocks[: steps * BATCH].split(BATCH):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def add_positive_bias(
    model: "transformers.PhiForCausalLM", tokenizer: "transformers.PreTrainedTokenizerFast"
) -> None:
    """Shift the head's bias so that the model's zero-shot answer is "good" for `POSITIVE_SHARE` of public texts.

    Language models prefer one answer until they are fine-tuned or shown examples; the demo reproduces this. Label
    noise in the public reviews is not enough: its effect ranges from none to the same answer for every text.
    """
    import torch

    bad, good = (tokenizer(VERBALISERS[label])["input_ids"][0] for label in (0, 1))
    margins: list[float] = []
    with torch.no_grad():
        for text in public_texts(500, random.Random(f"partiality {SEED}")):
            logits = model(torch.tensor([tokenizer(text + SUFFIX)["input_ids"]])).logits[0, -1]
            margins.append((logits[good] - logits[bad]).item())
        threshold = sorted(margins)[round((1 - POSITIVE_SHARE) * len(margins))]
        model.lm_head.bias[good] -= threshold / 2
        model.lm_head.bias[bad] += threshold / 2
