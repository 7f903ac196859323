"""The demo's files: a private data set that the grammar writes, and a tiny language model of public text.

Building them takes most of a minute, so they are kept: a marker in the folder holds the digests of the files
and of the code that wrote them. With nothing to build, this module imports neither torch nor transformers.
"""

import hashlib
import json
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradmm_core.demo.grammar import SUFFIX, VERBALISERS, private_rows, public_documents, public_texts
from gradmm_core.errors import InputError

if TYPE_CHECKING:
    import torch
    import transformers

SEED = 20250713
SPLITS = {"train": 2000, "validation": 400, "test": 600}  # rows
END = "<|endoftext|>"
MARKER = "demo.json"

VOCABULARY = 2048  # tokens at most: enough for almost every word to be one
HIDDEN, LAYERS, HEADS, CONTEXT = 96, 2, 4, 512
DOCUMENTS = 36_000
BLOCK, BATCH = 128, 8  # tokens in a training block, blocks in a step
PARTIALITY = 0.78  # the share of public texts, half of them negative, that the model alone calls good
THREADS = 2  # more are slower on a model of this size, and would sum in another order
LEARNING_RATE, WARM_UP = 5e-3, 50  # the peak, and the steps until it


@dataclass(frozen=True)
class DemoMaterial:
    """Where the demo's files lie.

    Attributes:
        data: a folder with `train.parquet`, `validation.parquet` and `test.parquet`, whose columns are `text`
            (string) and `label` (int64: 0 negative, 1 positive).
        model: a Hugging Face folder with a `PhiForCausalLM` and its tokenizer.
    """

    data: Path
    model: Path


def build_demo(folder: Path) -> DemoMaterial:
    """Writes the demo's data and model into `folder`, unless they are there already.

    The folder appears complete or not at all. The texts depend on nothing but this code; the weights, trained
    on the CPU from a fixed seed, also on the machine's arithmetic. No global random state is disturbed.

    Args:
        folder: where to write. It may be missing, empty, or hold an older demo, which is replaced.

    Returns:
        The paths inside `folder`.

    Raises:
        InputError: the folder holds something that is not a demo.
        OSError: the folder cannot be written.
    """
    material = DemoMaterial(data=folder / "data", model=folder / "model")
    if is_complete(folder):
        return material
    if folder.exists() and not (folder / MARKER).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("holds something other than a demo", str(folder), "empty it or choose another folder")
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        write_material(staging)
        put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return material


# --- The folder --------------------------------------------------------------------------------------------


def generator_digest() -> str:
    """A digest of the code that decides what the demo's files hold."""
    sources = (Path(__file__), Path(__file__).with_name("grammar.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def digests_of(folder: Path) -> dict[str, str]:
    """The SHA-256 digest of every file in the folder but the marker, by its path inside."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MARKER)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def is_complete(folder: Path) -> bool:
    """Whether this very code has written the folder, and every file in it is still as written."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return False
    return marker == {"generator": generator_digest(), "files": digests_of(folder)}


def put_in_place(staging: Path, folder: Path) -> None:
    """Moves the finished `staging` folder to `folder`, unless another process has finished one there."""
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
    """Writes all files of the demo, and the marker last, into a new `folder`."""
    private = private_rows(sum(SPLITS.values()), random.Random(f"private {SEED}"))
    write_splits(private, folder / "data")
    forbidden = frozenset(text for text, _ in private)
    documents = list(public_documents(DOCUMENTS, random.Random(f"public {SEED}"), forbidden))
    write_model(documents, folder / "model")
    marker = {"generator": generator_digest(), "files": digests_of(folder)}
    (folder / MARKER).write_text(json.dumps(marker, indent=1))


def write_splits(rows: list[tuple[str, int]], folder: Path) -> None:
    """Writes the rows, in their order, into one Parquet file for each of `SPLITS`."""
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


@contextmanager
def threads(most: int) -> Iterator[None]:
    """Lets torch use `most` threads at most for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(most, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_model(documents: list[str], folder: Path) -> None:
    """Trains a tokenizer and a model on the documents and saves both into `folder`."""
    import torch

    tokenizer = train_tokenizer(documents)
    for words in (SUFFIX + verbaliser for verbaliser in VERBALISERS.values()):
        assert len(tokenizer.tokenize(words)) == 3, f"{words!r} is not three tokens"
    end = tokenizer.get_vocab()[END]
    blocks = torch.tensor(list(blocks_of(tokenizer(documents)["input_ids"], end)))
    with torch.random.fork_rng(devices=[]), threads(THREADS):
        # The CPU's alone: torch.manual_seed would seed accelerators too, whose state is not set aside.
        torch.default_generator.manual_seed(SEED)
        model = train_model(blocks, len(tokenizer), end)
        make_partial(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- The model ---------------------------------------------------------------------------------------------


def train_tokenizer(documents: list[str]) -> "transformers.PreTrainedTokenizerFast":
    """A byte-level BPE of `VOCABULARY` tokens, the first of which ends a document."""
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
    """Blocks of `BLOCK` tokens, each of which begins with a document, every second time after an `end` token.

    The last document of a block is cut off, and a last block that is not full is dropped.
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
    """A tiny Phi trained once through `blocks` (number x `BLOCK`, token ids), in their order."""
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
        initializer_range=0.06,  # at this width the usual 0.02 learns the classes half as fast
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


def make_partial(model: "transformers.PhiForCausalLM", tokenizer: "transformers.PreTrainedTokenizerFast") -> None:
    """Shifts the head's bias so that, asked without examples, the model calls `PARTIALITY` of public texts good.

    Language models prefer one answer until they are fine-tuned or shown examples, and this one is to have that to
    learn. The noise in the public reviews alone has anything between no effect and one answer for every text.
    """
    import torch

    bad, good = (tokenizer(VERBALISERS[label])["input_ids"][0] for label in (0, 1))
    margins: list[float] = []
    with torch.no_grad():
        for text in public_texts(500, random.Random(f"partiality {SEED}")):
            logits = model(torch.tensor([tokenizer(text + SUFFIX)["input_ids"]])).logits[0, -1]
            margins.append((logits[good] - logits[bad]).item())
        threshold = sorted(margins)[round((1 - PARTIALITY) * len(margins))]
        model.lm_head.bias[good] -= threshold / 2
        model.lm_head.bias[bad] += threshold / 2
