"""Growth of time and memory: generation over examples, batch, length and vocabulary; the target over records.

    python -m benchmarks.scaling --model ../shared/material/models/reviews-phi-9m \
        --data ../shared/material/data/sst2 --json scaling.json

Every measurement runs in a fresh process, so that none includes the memory of another. "work" is the peak above
the memory in use before. Generation matches the whole head's gradient, the most expensive target, after a warm-up
with two texts. The target gradient is computed in the default space. Larger vocabularies belong to models with
random weights and the same body: only the tokenizer's tokens are written, but all logits are computed. CPU time is
reported beside elapsed time, as other load on the machine affects it less.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.timing import device_name
from benchmarks.whole_generation import generation
from benchmarks.workload import INSTRUCTION, DType, Workload
from gradmm.config.settings import AdmmSettings, GenerationSettings, ModelSettings, TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.evaluation.peak_memory import peak_memory
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import tokenise_template
from gradmm.target.target_gradient import target_sums
from gradmm.target.target_space import make_target_space, public_texts

METHODS = {
    "search": GenerationSettings(method="search", loss="cosine"),
    "ADMM, one round": GenerationSettings(method="admm", loss="cosine", admm=AdmmSettings(iterations=1)),
}


@dataclass(frozen=True)
class Generation:
    """One generation to measure."""

    model: str
    dtype: DType
    method: str
    examples: int
    batch: int
    tokens: int

    def prepare(self) -> Callable[[], Any]:
        work = Workload.of(argparse.Namespace(model=self.model, tokens=self.tokens), self.dtype)
        settings = METHODS[self.method].model_copy(update={"batch_size": self.batch})
        generation(work, settings, 2)()
        return generation(work, settings, self.examples)


@dataclass(frozen=True)
class Target:
    """One target gradient to measure, on the first rows of a data set."""

    model: str
    dtype: DType
    data: str
    records: int

    def prepare(self) -> Callable[[], Any]:
        model = load_language_model(resolve_model(ModelSettings(name=self.model, dtype=self.dtype)))
        prompt_template = PromptTemplate(
            suffix=" It was", verbalisers={0: " bad", 1: " great"}, max_text_tokens=128
        )
        template, settings = tokenise_template(model, prompt_template), TargetGradientSettings()
        texts = public_texts(model, template, dict.fromkeys(template.labels, INSTRUCTION), settings)
        space, _ = make_target_space(model, template, texts, settings, 1.0)
        rows = pd.read_parquet(Path(self.data) / "train.parquet").iloc[: self.records]
        data = LabelledTexts(tuple(rows["text"].str.strip()), tuple(rows["label"].tolist()))
        return lambda: target_sums(model, template, data, settings, 1.0, None, space)


@dataclass(frozen=True)
class Measured:
    """Elapsed and CPU seconds; bytes at the peak of the process, above the memory before, and on the GPU."""

    seconds: float
    processor_seconds: float
    peak: int
    work: int
    gpu: int | None


def measure(case: Generation | Target) -> Measured:
    """Measure one case in this process, which should be fresh."""
    work = case.prepare()
    gc.collect()
    before = psutil.Process().memory_info().rss
    with peak_memory() as peak:
        started, processor = time.perf_counter(), time.process_time()
        work()
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
    return Measured(seconds, processor, peak.process, peak.process - before, peak.gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description="Growth of time and memory")
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--data", help="a folder with train.parquet (text, label), for the target gradient")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--examples", type=int, nargs="*", default=[50, 100, 200, 500, 1000])
    parser.add_argument("--batches", type=int, nargs="*", default=[10, 25, 50, 100, 200])
    parser.add_argument("--tokens", type=int, nargs="*", default=[10, 25, 50, 100])
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--records", type=int, nargs="*", default=[1000, 10_000, 10**9], help="capped at all rows")
    parser.add_argument("--texts", type=int, default=100, help="examples of 25 tokens, where another size varies")
    parser.add_argument("--batch", type=int, default=50, help="batch size, where another size varies")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for title, unit, cases in series(options, Path(folder)):
            rows += report(title, unit, cases)
    if options.json:
        options.json.write_text(json.dumps({"device": device_name(), "rows": rows}, indent=2) + "\n")


#: A heading, the unit of the counts, and the cases by the value that varies.
Series = tuple[str, str, Iterable[tuple[int, Generation | Target]]]


def series(options: argparse.Namespace, folder: Path) -> Iterable[Series]:
    for method in options.methods:
        base = Generation(options.model, options.dtype, method, options.texts, options.batch, 25)
        yield f"{method}: examples", "example", [(n, replace(base, examples=n)) for n in options.examples]
        yield (
            f"{method}: batch",
            "example",
            [(n, replace(base, batch=n, examples=max(n, base.examples))) for n in options.batches],
        )
        yield f"{method}: tokens of a text", "example", [(n, replace(base, tokens=n)) for n in options.tokens]
        yield (
            f"{method}: vocabulary",
            "example",
            [(n, replace(base, model=random_model(options.model, n, folder))) for n in options.vocabularies],
        )
    if options.data:
        available = len(pd.read_parquet(Path(options.data) / "train.parquet", columns=["label"]))
        counts = sorted({min(n, available) for n in options.records})
        cases = [(n, Target(options.model, options.dtype, options.data, n)) for n in counts]
        yield "target gradient: records", "record", cases


def random_model(model: str, vocabulary: int, folder: Path) -> str:
    """Save a model like `model` with random weights and another vocabulary size; return its folder.

    Raises:
        SystemExit: if the tokenizer has more tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    if vocabulary < len(tokenizer):
        raise SystemExit(f"--vocabularies: {vocabulary} is smaller than the tokenizer's {len(tokenizer)}")
    saved = folder / str(vocabulary)
    if not saved.exists():
        config = AutoConfig.from_pretrained(model, vocab_size=vocabulary)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(saved)
        tokenizer.save_pretrained(saved)
    return str(saved)


def report(title: str, unit: str, cases: Iterable[tuple[int, Generation | Target]]) -> list[dict[str, Any]]:
    """Measure and print one series, with ratios of time and memory to its first row."""
    rows: list[dict[str, Any]] = []
    first: tuple[float, float, int] | None = None
    for value, case in cases:
        found = in_a_fresh_process(case)
        count = case.records if isinstance(case, Target) else case.examples
        each, cpu = found.seconds / count, found.processor_seconds / count
        if first is None:
            first = each, cpu, found.peak
            print(f"{title}; {device_name()}")
        gpu = "" if found.gpu is None else f"   GPU {found.gpu / 2**30:.2f} GiB"
        print(
            f"  {value:8,} {1000 * each:10.3f} ms per {unit} {each / first[0]:6.2f} x   "
            f"CPU {1000 * cpu:10.3f} ms {cpu / first[1]:6.2f} x   "
            f"peak {found.peak / 2**30:5.2f} GiB {found.peak / first[2]:6.2f} x   "
            f"work {found.work / 2**20:6.0f} MiB{gpu}",
            flush=True,
        )
        rows.append({"series": title, "value": value, **asdict(case), **asdict(found), "seconds_each": each})
    return rows


def in_a_fresh_process(case: Generation | Target) -> Measured:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, case).result()


if __name__ == "__main__":
    main()
