"""Tokenised examples of a data set, and random samples of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.config.settings import FinetuneEvalSettings


@dataclass(frozen=True)
class Examples:
    """Token ids of texts, without the template's prefix and suffix, and their labels.

    Attributes:
        probabilities: of the classes, in the order of the template's labels. None: 1 for each text's label.
    """

    texts: Sequence[list[int]]
    labels: Sequence[int]
    probabilities: Float[Tensor, "examples classes"] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def class_probabilities(self, labels: Sequence[int]) -> Float[Tensor, "examples classes"]:
        """Return `probabilities`, or 1 for each example's label, in the order of `labels`."""
        if self.probabilities is not None:
            return self.probabilities
        columns = torch.tensor([labels.index(label) for label in self.labels], dtype=torch.int64)
        return torch.nn.functional.one_hot(columns, len(labels)).double()

    def take(self, rows: Sequence[int]) -> Examples:
        probabilities = None if self.probabilities is None else self.probabilities[list(rows)]
        return Examples([self.texts[i] for i in rows], [self.labels[i] for i in rows], probabilities)

    def sample(self, max_rows: int | None, seed: int) -> Examples:
        """Sample at most `max_rows` rows. Return all rows, in order, if there are no more."""
        return self.take(sample_rows(len(self), max_rows, seed))


def sample_rows(rows: int, max_rows: int | None, seed: int) -> list[int]:
    """Sample at most `max_rows` of `rows` row numbers. Return all, in order, if there are no more."""
    if max_rows is None or rows <= max_rows:
        return list(range(rows))
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:max_rows].tolist()


def sample_class_rows(labels: Sequence[int], counts: Mapping[int, int], seed: int) -> list[int]:
    """Sample `counts[label]` row numbers of each label, or all of them if there are fewer.

    Samples are nested: with the same seed, a smaller sample is the beginning of a larger one.
    """
    left = dict(counts)
    rows = []
    for row in torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist():
        label = labels[row]
        if left.get(label, 0) > 0:
            left[label] -= 1
            rows.append(row)
    return rows


@dataclass(frozen=True)
class HeldOut:
    """Validation and test examples for a fine-tuned model."""

    validation: Examples
    test: Examples

    def limited(self, settings: FinetuneEvalSettings, seed: int) -> HeldOut:
        """Sample each split down to the maximum in the settings."""
        return HeldOut(
            self.validation.sample(settings.max_validation_rows, seed),
            self.test.sample(settings.max_test_rows, seed),
        )


def class_counts(size: int, labels: Sequence[int]) -> dict[int, int]:
    """Divide `size` texts evenly among the classes; the first classes get the remainder, one each."""
    each, remainder = divmod(size, len(labels))
    return {label: each + (i < remainder) for i, label in enumerate(labels)}
