"""Compute each record's vector such that it depends on that record alone.

The number of rows and the padded length of a batch decide how matrix products are blocked, and so the last bits of
every row. In models whose rotary factors follow the padded length, they change much more. One record could then
move the vectors of all others, and the sum would have no known sensitivity. Here, every batch has the same number
of rows, and a padded length that each of its records determines alone. Rows without a record hold a filler text.

A record's vector could still depend on its row and on the content of the other rows. A private run therefore
checks each shape before its first use (`independent_rows`): it computes random texts twice in different rows, and
beside different texts. If the bits differ, records of this shape are computed one at a time. So are all records of
a mixture of experts: how many tokens an expert gets, and so the shape of its products, depends on all texts of a
batch, and random texts need not show it. The same holds for a model with quantised weights, as its layers may
decide by the whole batch how inputs are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from gradmm.gradients.head_gradient import HeadGradients, head_gradients
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenIds, TokenisedTemplate, make_batch, token_counts
from gradmm.privacy.clipped_sum import RecordVectors
from gradmm.target.features import text_means
from gradmm.target.independent_rows import independent_rows
from gradmm.target.target_space import TargetSpace
from gradmm.target.token_rates import token_presence, token_weights

#: Up to SHORT tokens, padded lengths are multiples of STEP; beyond, there are four in an octave.
STEP, SHORT = 8, 32

#: Token of a filler text, and of padding.
FILLER = 0


def padded_length(tokens: int, positions: int | None = None) -> int:
    """Return the length to which an input of `tokens` tokens is padded, at most the model's `positions`."""
    step = STEP if tokens <= SHORT else max(STEP, 2 ** ((tokens - 1).bit_length() - 3))
    length = -(-tokens // step) * step
    return length if positions is None else min(length, positions)


@dataclass(frozen=True)
class RecordBatches:
    """Computes records' vectors in batches of fixed shapes.

    Attributes:
        rows: the number of rows of a batch; public, since it affects the last bits of every vector.
        private: whether to fill up the last batches, and to check each shape before its use.
    """

    language_model: LanguageModel
    template: TokenisedTemplate
    space: TargetSpace
    rows: int
    private: bool
    _verified: dict[tuple[int, int], int] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(
        self, texts: TokenIds, records: Int[np.ndarray, " records"], label: int, skip: int = 0
    ) -> Iterator[tuple[list[int], RecordVectors]]:
        """Compute the vectors of one class's records, those of the shortest padded length first.

        Yields the numbers of a batch's records with their vectors, which are its first rows.

        A class without records has one batch without a record, which gives its sums their shape.

        Args:
            texts: the whole data set's.
            records: numbers of the class's texts.
            skip: leave out this number of records at the beginning.

        Raises:
            InputError: if a text's vector differs between two passes over it, in a private run.
        """
        tokens, own = np.unique(token_counts(texts)[records], return_inverse=True)
        lengths = np.array([self._length(count, label) for count in tokens.tolist()], dtype=np.int64)[own]
        order = np.argsort(lengths, kind="stable")[skip:]
        if not len(records):
            yield [], self._vectors([], self._length(1, label), label, rows=1)
        name = f"target gradient, label {label}"
        with tqdm(total=len(order), desc=name, unit="text", disable=None, leave=False) as bar:
            for length in np.unique(lengths[order]).tolist():
                of_length = records[order[lengths[order] == length]]
                rows = self._rows(length, label)
                for start in range(0, len(of_length), rows):
                    part = of_length[start : start + rows].tolist()
                    padded = rows if self.private else len(part)
                    yield part, self._vectors([texts[i] for i in part], length, label, padded)
                    bar.update(len(part))

    def _length(self, text_tokens: int, label: int) -> int:
        tokens = len(self.template.prefix) + text_tokens + len(self.template.tail(label))
        return padded_length(tokens, self.language_model.positions)

    def _vectors(self, texts: list[list[int]], length: int, label: int, rows: int) -> RecordVectors:
        """Compute the vectors of at most `rows` texts in one batch of `rows` x `length` tokens.

        A text without tokens has none: NaN, which counts as zero.
        """
        # The model has no input where a text, the prefix and the suffix have no tokens.
        some = [text or [FILLER] for text in texts] + [[FILLER]] * (rows - len(texts))
        gradients, features = self._heads(some, length, label)
        none = [row for row, text in enumerate(texts) if not text]
        gradients.hidden[none] = torch.nan
        if features is not None:
            features[none] = torch.nan
        present = torch.arange(rows, device=self.language_model.device) < len(texts)
        each = None if features is None else features[:, None]
        tokens = self.token_vectors(texts + [[]] * (rows - len(texts)))
        return RecordVectors(self.space.project(gradients, label), each, present, tokens=tokens)

    def token_vectors(self, texts: list[list[int]]) -> Float[Tensor, "texts tokens"] | None:
        """Compute each text's `token_presence`; None if no token rates are released."""
        if self._token_weights is None:
            return None
        return token_presence(texts, self._token_weights).to(self.language_model.device)

    @cached_property
    def _token_weights(self) -> Float[Tensor, " vocabulary"] | None:
        return None if self.space.frequencies is None else token_weights(self.space.frequencies)

    def _heads(
        self, texts: list[list[int]], length: int, label: int
    ) -> tuple[HeadGradients, Float[Tensor, "rows features"] | None]:
        """Compute the texts' head gradients, before they are mapped to the target's space, and their features."""
        device = self.language_model.device
        batch = make_batch(self.template, texts, [label] * len(texts), device, length)
        features, hidden = None, None
        if self.space.features is not None:
            layers = self.language_model.layers(input_ids=batch.input_ids)
            features = self.space.features.with_constant(text_means(layers, batch.text_mask))
            hidden = layers[-1]
        return head_gradients(self.language_model, batch, hidden).double(), features

    def _rows(self, length: int, label: int) -> int:
        """Return the number of rows for records of this padded length: all, or 1 if a record's place counts."""
        if not self.private:
            return self.rows
        shape = (length, len(self.template.responses[label]))
        if shape not in self._verified:
            self._verified[shape] = self._verify(length, label)
        return self._verified[shape]

    def _verify(self, length: int, label: int) -> int:
        room = max(1, length - len(self.template.prefix) - len(self.template.tail(label)))
        bits = partial(self._bits, length=length, label=label)
        return independent_rows(self.language_model, self.rows, room, bits)

    def _bits(
        self, texts: Int[np.ndarray, "rows tokens"], length: int, label: int
    ) -> Float[Tensor, "rows numbers"]:
        """Compute all numbers on the way to a vector. The few in the target's space could be equal by chance."""
        whole, features = self._heads(texts.tolist(), length, label)
        gradients = self.space.project(whole, label)
        parts = [whole.residual, whole.hidden, gradients.residual, gradients.hidden, gradients.norms()]
        if self.space.rows is not None:  # the gradients of a whole head are never built
            parts.append(gradients.materialise())
        if features is not None:
            parts.append(features)
        return torch.cat([part.reshape(len(texts), -1) for part in parts], dim=1)
