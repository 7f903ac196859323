"""Dress rehearsal: models of real shapes, with random weights, through a whole private run at a tiny budget.

    python -m benchmarks.rehearsal qwen2.5-0.5b phi-1.5 [--texts 2] [--batch-size 8] [--lora-rank 16]

Time and memory of a pass do not depend on what the weights are, so this shows what a run with the real model takes
on this machine. Each shape has its own number of tokens, of a tokenizer made of random words. The peak memory of
each stage stands beside the one that `gradmm check` computes, and the speed of a pass through the body beside the
speed of a large matrix product.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.load import MIB, SENTENCES, recipe_values, run_here, write_data
from gradmm import load_recipe
from gradmm.demo.grammar import private_rows
from gradmm.evaluation.memory_plan import memory_plan
from gradmm.evaluation.trainable import linear_layers
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import forget_large_model, load_language_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import tokenise_template

#: Configurations of published models, as `AutoConfig.for_model` takes them.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "llama",  # the same layers; for Qwen's own, transformers would replace the tokenizer
        {
            "attention_bias": True,
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "opt-1.3b": (
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": 2048,
            "word_embed_proj_dim": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
        },
    ),
    "phi-1.5": (
        "phi",
        {
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama-2-7b": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Models of real shapes through the whole pipeline")
    parser.add_argument("shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--texts", type=int, default=2, help="synthetic texts of each class")
    parser.add_argument("--rows", type=int, default=80, help="private records")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="public texts, and records and texts read at once"
    )
    parser.add_argument("--lora-rank", type=int, default=16)
    options = parser.parse_args()
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            rehearse(shape, options, Path(folder))


def rehearse(shape: str, options: argparse.Namespace, folder: Path) -> None:
    """Print time and peak memory of each stage of a private run, beside the computed one."""
    print(f"{shape}: {pass_speed(save_model(shape, folder / 'model'))}", flush=True)
    recipe, root = folder / "rehearsal.yaml", folder / "root"
    recipe.write_text(yaml.safe_dump(tiny_values(folder, options)))
    loaded = load_recipe(str(recipe))
    model = load_language_model(loaded.model)
    plan = memory_plan(loaded, model, tokenise_template(model, PromptTemplate.of(loaded)))
    forget_large_model(model)
    del model
    began = time.perf_counter()
    run_here(recipe, root)
    print(
        f"{shape}: {plan.parameters / 1e6:,.0f} million parameters, {time.perf_counter() - began:,.0f} s in all, "
        f"{torch.get_num_threads()} threads"
    )
    (record,) = root.glob("runs/*/run.json")
    for stage in json.loads(record.read_text())["stages"]:
        computed, peak = plan.stages.get(stage["stage"]), stage["peak_memory"]
        beside = "" if computed is None else f"   computed {computed / MIB:8,.0f} MiB ({computed / peak - 1:+.0%})"
        print(
            f"  {stage['stage']:18} {stage['rows']:6,} rows  {stage['seconds']:8.1f} s   "
            f"peak {peak / MIB:8,.0f} MiB{beside}",
            flush=True,
        )


@torch.no_grad()
def pass_speed(model: LanguageModel) -> str:
    """Compare the body's multiplications per second with those of a matrix product of the same number of rows."""
    texts, tokens = 16, 32
    ids = torch.randint(len(model.embeddings), (texts, tokens))
    weights = sum(layer.weight.numel() for layer in linear_layers(model.model).values())
    left, right = (torch.randn(rows, 4096).to(model.body_dtype) for rows in (texts * tokens, 4096))

    def rate(multiplications: int, work: Callable[[], object]) -> float:
        work()
        seconds = min(timeit.repeat(work, number=1, repeat=3))
        return multiplications / seconds / 1e9

    body = rate(ids.numel() * weights, lambda: model.hidden_states(input_ids=ids))
    product = rate(ids.numel() * right.numel(), lambda: left @ right.mT)
    return f"{body:,.0f} billion multiplications a second in a pass, {product:,.0f} in a product"


def tiny_values(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A private recipe that runs every stage on a few short texts."""
    data = write_data(folder / "data", options.rows)
    values: dict[str, Any] = recipe_values(folder, data, 2 * options.texts, 1)
    values["model"] |= {"dtype": "bfloat16"}
    values["template"] = {"max_text_tokens": 32}  # texts of the data have 16 words at most
    values["privacy"] = {"epsilon": 8.0, "delta": 1e-5, "declared_records": options.rows}
    size = options.batch_size
    values["target_gradient"] = {"public_texts": size, "public_text_tokens": 8, "batch_size": size}
    values["labelling"] = {"batch_size": size}
    values["generation"] |= {"loss": "distance"}
    # Random weights classify at random, and their filter would leave no text of a class.
    values["label_filter"] = {"enabled": False}
    values["finetune_eval"] |= {
        "lora_rank": options.lora_rank,
        "batch_size": 4,
        "max_validation_rows": 8,
        "max_test_rows": 8,
    }
    values["mechanism_audit"] = {"draws": 400, "canaries": 20, "guesses": 10}
    values["mia_audit"] = {"runs": 1, "threshold_records": 4, "test_records": 4}
    return values


def save_model(shape: str, folder: Path) -> LanguageModel:
    """Save a model of a shape, with random weights in bfloat16, and a tokenizer of as many tokens."""
    family, sizes = SHAPES[shape]
    tokenizer = random_tokenizer(sizes["vocab_size"])
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    config = AutoConfig.for_model(family, **sizes, **ends, pad_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LanguageModel(model.requires_grad_(False), tokenizer)


def random_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer of the bytes, the words of the data and random words."""
    drawn = random.Random(0)
    of_data = {word for text, _ in private_rows(SENTENCES, drawn) for word in f"{text} good bad".split()}
    others = {"".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(3, 7))) for _ in range(2 * size)}
    end, letters = "<|endoftext|>", sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{word}" for word in (*sorted(of_data), *sorted(others - of_data))][: size - len(letters) - 1]
    pieces = [(end, 0.0), *((letter, -10.0) for letter in letters), *((word, -1.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


if __name__ == "__main__":
    main()
