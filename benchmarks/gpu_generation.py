"""The paper's job on one GPU: 200 texts of 25 tokens from a model of Phi-1.5's shape, by every method.

    python -m benchmarks.gpu_generation --json gpu.json
    python -m benchmarks.gpu_generation --methods compiled --iterations 2 --profile

The weights and the target (of the whole head) are random, as time and memory do not depend on them. The floor is
the time of the body's matrix products alone: two operations per parameter and token forward, and as many backward
(frozen weights need no gradient), at the throughput of one large product measured in the same run. Texts are
not cut at sentence ends, which random weights hardly ever write. Without a GPU a small model runs on the CPU, as a
check of the script.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PhiConfig

from benchmarks.timing import device_name
from benchmarks.whole_generation import generation
from benchmarks.workload import INSTRUCTION, LABEL, Workload
from gradmm.config.settings import (
    AdmmSettings,
    GenerationSettings,
    ProjectionSettings,
)
from gradmm.demo.grammar import public_documents
from gradmm.demo.material import END, train_tokenizer
from gradmm.evaluation.peak_memory import peak_memory
from gradmm.generation.generation import TextRequest, write
from gradmm.generation.shards import Shard
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.token_passes import ComputeMeter

#: On a GPU, Phi-1.5 and the paper's schedule; on a CPU, a minute of work.
PAPER = {"layers": 24, "hidden": 2048, "heads": 32, "vocabulary": 51_200, "examples": 200, "iterations": 30}
SMALL = {"layers": 2, "hidden": 256, "heads": 4, "vocabulary": 8192, "examples": 8, "iterations": 1}

MIB = 2**20

#: Generation methods; "compiled" is ADMM with compiled layers.
METHODS = ("admm", "compiled", "search", "written")


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="The paper's job on one GPU")
    for name, value in (PAPER if gpu else SMALL).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--inner-steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=25)
    parser.add_argument("--batch", type=int, help="examples per batch (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--matmul", type=int, default=8192 if gpu else 2048, help="rows of the large product")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.batch = options.batch or options.examples
    if not gpu:
        print("no GPU: a small model on the CPU, not a GPU measurement")
    with tempfile.TemporaryDirectory() as folder:
        options.model = save_model(options, Path(folder))
        work = Workload.of(options, "bfloat16")
    size = body_parameters(work.model)
    throughput = matmul_throughput(options.matmul, work.model.device)
    print(
        f"{device_name()}; {options.layers} layers, {size / 1e6:,.1f} M parameters in the body; "
        f"{options.examples} examples of {options.tokens} tokens; matrix product {throughput / 1e12:.3g} TFLOP/s"
    )
    run_of(work, settings_of("search", options), 2)()  # one-time setup
    rows = []
    for name in options.methods:
        run = run_of(work, settings_of(name, options), options.examples)
        with ComputeMeter(work.model) as meter, peak_memory() as peak, kernels(options.profile):
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
        floor = 2 * size * (meter.forward_tokens + meter.backward_tokens) / throughput
        memory = peak.process if peak.gpu is None else peak.gpu
        print(
            f"  {name:16} {seconds:10.1f} s   floor {floor:8.1f} s   share of the floor {floor / seconds:6.1%}   "
            f"peak {memory / MIB:8,.0f} MiB{'' if gpu else ' (of the process)'}"
        )
        passes = {"forward_tokens": meter.forward_tokens, "backward_tokens": meter.backward_tokens}
        rows.append({"method": name, "seconds": seconds, "floor": floor, "peak_bytes": memory, **passes})
    if options.json:
        shape = {name: getattr(options, name) for name in (*PAPER, "inner_steps", "tokens")}
        found = {"device": device_name(), "gpu": gpu, **shape, "body_parameters": size, "batch": options.batch}
        options.json.write_text(json.dumps(found | {"matmul_flops": throughput, "rows": rows}, indent=2) + "\n")


def settings_of(method: str, options: argparse.Namespace) -> GenerationSettings:
    """Return the paper's schedule for ADMM, and defaults for the other methods."""
    if method not in ("admm", "compiled"):
        settings = {"method": method, "loss": "cosine", "batch_size": options.batch, "whole_sentences": False}
        return GenerationSettings.model_validate(settings)
    schedule = AdmmSettings(
        iterations=options.iterations, inner_steps=options.inner_steps, rho=0.1, patience=None, keep="last"
    )
    return GenerationSettings(
        method="admm",
        loss="cosine",
        admm=schedule,
        projection=ProjectionSettings(rule="nearest-of-likely", candidates=200),
        batch_size=options.batch,
        compile_layers=method == "compiled",
    )


def run_of(work: Workload, settings: GenerationSettings, examples: int) -> Callable[[], object]:
    """Return a function that generates texts."""
    if settings.method != "written":
        return generation(work, settings, examples)
    shard = Shard(LABEL, 0, 0, examples)
    request = TextRequest(work.model, work.template, INSTRUCTION, "good", shard, work.tokens, settings, 0)
    return lambda: write(request)


@contextmanager
def kernels(wanted: bool) -> Iterator[None]:
    """Print the kernels that took longest while the context was active, if `wanted`."""
    if not wanted:
        yield
        return
    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        yield
    seconds = {
        each.key: (each.self_device_time_total if gpu else each.self_cpu_time_total) / 1e6
        for each in found.key_averages()
    }
    for kernel, spent in sorted(seconds.items(), key=lambda item: -item[1])[:20]:
        print(f"    {spent:10.4f} s  {kernel[:90]}")


def save_model(options: argparse.Namespace, folder: Path) -> str:
    """Save a Phi with random weights in bfloat16 and the demo's tokenizer; return its folder."""
    tokenizer = train_tokenizer(list(public_documents(3000, Random(0), frozenset())))
    end = tokenizer.get_vocab()[END]
    config = PhiConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        bos_token_id=end,
        eos_token_id=end,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def body_parameters(model: LanguageModel) -> int:
    """Count the parameters without the embeddings and the head."""
    body = sum(parameter.numel() for parameter in model.model.base_model.parameters())
    return body - model.embeddings.numel()


def matmul_throughput(rows: int, device: torch.device) -> float:
    """Measure operations per second of a square product in bfloat16: the best of ten after a warm-up."""
    left, right = (torch.randn(rows, rows, device=device).bfloat16() for _ in range(2))
    best = float("inf")
    for turn in range(11):
        _wait(device)
        started = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        if turn:
            best = min(best, time.perf_counter() - started)
    return 2 * rows**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
