"""The cost of batches in which a record's vector depends on that record alone.

    python -m benchmarks.record_batches --model MODEL --data FOLDER_OF_SST2 [--records 67349] [--dtype bfloat16]

The obvious way sorts the texts by length, and pads each batch to its longest text. A private target instead pads
each text to a length of its own, fills up the last batches, and checks each shape of a batch before its first use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import report
from gradmm.config.settings import DataSettings, ModelSettings, TargetGradientSettings
from gradmm.data.splits import load_splits
from gradmm.gradients.head_gradient import head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import (
    TokenIds,
    TokenisedTemplate,
    length_bucketed,
    make_batch,
    token_counts,
    tokenise_split,
    tokenise_template,
)
from gradmm.privacy.clipped_sum import RecordSums, RecordVectors
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.target.features import text_means
from gradmm.target.record_batches import RecordBatches
from gradmm.target.target_space import TargetSpace, make_target_space

Batches = Iterator[tuple[list[int], RecordVectors]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of batches of fixed shapes")
    parser.add_argument("--model", required=True, help="a model folder or hub id")
    parser.add_argument("--data", required=True, help="a folder with train.parquet and validation.parquet")
    parser.add_argument("--records", type=int, default=67_349)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    language_model = load_language_model(resolve_model(ModelSettings(name=options.model, dtype=options.dtype)))
    prompt_template = PromptTemplate(suffix=" It was", verbalisers={0: " bad", 1: " great"}, max_text_tokens=128)
    template = tokenise_template(language_model, prompt_template)
    data = load_splits(DataSettings(path=options.data, test_split="validation"), (0, 1), 0).train
    data = data.take(list(range(min(options.records, len(data)))))
    space, rows = public_space(language_model, template), TargetGradientSettings().batch_size
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        ways: dict[str, Callable[..., Batches]] = {
            "sorted by length, padded to the longest": SortedBatches(language_model, template, space, rows),
            "by the record alone": RecordBatches(language_model, template, space, rows, private=True),
        }
        for name, batches in ways.items():
            started = time.perf_counter()
            texts = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, "train")
            for label in template.labels:
                add_up(batches(texts, data.of_class(label), label))
            seconds.setdefault(name, []).append((time.perf_counter() - started) / len(data))
    found = {name: min(times) for name, times in seconds.items()}
    title = f"sum of {len(data)} records"
    report(title, found, "sorted by length, padded to the longest", options.json, dtype=options.dtype)


def public_space(language_model: LanguageModel, template: TokenisedTemplate) -> TargetSpace:
    """Make the space of a gradient and a probe, from random tokens."""
    random = np.random.default_rng(0)
    texts = {label: random.integers(1, 1000, (100, 25)).tolist() for label in template.labels}
    settings = TargetGradientSettings(probe_share=0.5, token_share=0.0)
    return make_target_space(language_model, template, texts, settings, 1.0, 64)[0]


def add_up(batches: Batches) -> None:
    sums, norms = RecordSums(), ReleaseNorms.of(1.0, 0.5)
    for _, vectors in batches:
        sums.add(vectors, norms, None)


@dataclass(frozen=True)
class SortedBatches:
    """The obvious way, with the interface of `RecordBatches`."""

    language_model: LanguageModel
    template: TokenisedTemplate
    space: TargetSpace
    rows: int

    @torch.no_grad()
    def __call__(self, texts: TokenIds, records: np.ndarray, label: int) -> Batches:
        assert self.space.features is not None
        for part in length_bucketed(token_counts(texts)[records], self.rows):
            chosen = [texts[i] for i in records[part].tolist()]
            batch = make_batch(self.template, chosen, [label] * len(part), self.language_model.device)
            layers = self.language_model.layers(input_ids=batch.input_ids)
            features = self.space.features.with_constant(text_means(layers, batch.text_mask))
            gradients = head_gradients(self.language_model, batch, layers[-1]).double()
            present = torch.ones(len(part), dtype=torch.bool)
            vectors = RecordVectors(self.space.project(gradients, label), features[:, None], present)
            yield records[part].tolist(), vectors


if __name__ == "__main__":
    main()
