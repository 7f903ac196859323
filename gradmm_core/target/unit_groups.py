"""Combine the records of each unit of privacy, such as a person, so that they are clipped together.

A unit's vector is the mean of its records' vectors, over at most `rows_per_unit` of them. A person with many
records then counts as much as one with a single record. The part of a unit's vector in one class has a row of its
own; its norm follows from the share of the unit's records in this class (`RecordSums.add`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.data.splits import LabelledTexts
from gradmm.gradients.head_gradient import HeadGradients
from gradmm.lm.template import TokenIds
from gradmm.privacy.clipped_sum import RecordVectors, UnitSizes
from gradmm.target.record_batches import RecordBatches

#: Records whose vectors are in memory at a time, at least. With fewer, more rows of batches would be fillers.
CHUNK = 4096

#: The numbers of one unit's records in one class, and the number of its records in all classes.
Group = tuple[list[int], int]


@dataclass(frozen=True)
class UnitGroups:
    """Computes the vectors of groups: the records of one unit in one class.

    Attributes:
        rows_per_unit: the largest number of a unit's records, over all classes. The first ones are used.
    """

    record_batches: RecordBatches
    rows_per_unit: int

    def __call__(
        self, texts: TokenIds, data: LabelledTexts, label: int, skip: int = 0
    ) -> Iterator[tuple[list[int], RecordVectors]]:
        """Compute the vectors of one class's groups; yield them with the numbers of their records.

        Args:
            skip: leave out this number of groups at the beginning.
        """
        groups = unit_groups(data, label, self.rows_per_unit)
        if not groups:
            yield from self.record_batches(texts, np.empty(0, dtype=np.int64), label)
        rows, begin = self.record_batches.rows, 0
        for chunk in _chunks(groups):
            left = chunk[max(0, skip - begin) :]
            begin += len(chunk)
            if not left:
                continue
            vectors = self._of_records(texts, [row for group, _ in left for row in group], label)
            for start in range(0, len(left), rows):
                part = left[start : start + rows]
                yield [row for group, _ in part for row in group], self._combined(texts, vectors, part)

    def _of_records(self, texts: TokenIds, records: list[int], label: int) -> dict[int, RecordVectors]:
        """Compute each record's vector, as a batch of one; without tokens, whose vectors are long."""
        found = {}
        for numbers, vectors in self.record_batches(texts, np.array(records), label):
            gradients, features = vectors.gradients, vectors.features
            for row, number in enumerate(numbers):
                one = slice(row, row + 1)
                own = HeadGradients(gradients.residual[one], gradients.hidden[one], gradients.centre)
                present = torch.ones(1, dtype=torch.bool, device=own.hidden.device)
                found[number] = RecordVectors(own, None if features is None else features[one], present)
        return found

    def _combined(self, texts: TokenIds, vectors: dict[int, RecordVectors], groups: list[Group]) -> RecordVectors:
        """Combine the records of each group to one row.

        A private run fills up the rows, so that the number of other groups does not change a group's bits.
        """
        members = [[vectors[row] for row in group] for group, _ in groups]
        device = members[0][0].gradients.hidden.device
        counts = torch.tensor([len(group) for group in members], dtype=torch.float64, device=device)
        records = torch.tensor([size for _, size in groups], dtype=torch.float64, device=device)
        share = counts / records
        residual = self._stacked([[each.gradients.residual[0] for each in group] for group in members])
        hidden = self._stacked([[each.gradients.hidden[0] for each in group] for group in members])
        residual = residual / records[:, None, None]
        centre = members[0][0].gradients.centre
        if centre is not None:
            # The centre, once for each record, as further factors: -share e_t as residual, and row t as hidden.
            unit = torch.eye(len(centre), dtype=centre.dtype, device=device)
            residual = torch.cat([residual, -share[:, None, None] * unit], dim=1)
            hidden = torch.cat([hidden, centre.expand(len(groups), -1, -1)], dim=1)
        of_texts = [[each.features[0] for each in group if each.features is not None] for group in members]
        features = self._stacked(of_texts) if of_texts[0] else None
        of_tokens = [self.record_batches.token_vectors([texts[row] for row in group]) for group, _ in groups]
        sums = [each.sum(dim=0) for each in of_tokens if each is not None]
        tokens = torch.stack(sums) / records[:, None] if sums else None
        present = torch.ones(len(groups), dtype=torch.bool, device=device)
        fill = self._filled
        return RecordVectors(
            HeadGradients(fill(residual), fill(hidden)),
            None if features is None else fill(features),
            fill(present),
            UnitSizes(fill(records, 1), fill(share, 1)),
            None if tokens is None else fill(tokens),
        )

    def _filled(self, rows: Tensor, value: int = 0) -> Tensor:
        """Append rows of a value, in a private run."""
        missing = self.record_batches.rows - len(rows) if self.record_batches.private else 0
        return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])

    def _stacked(
        self, groups: list[list[Float[Tensor, "positions width"]]]
    ) -> Float[Tensor, "groups all_positions width"]:
        """Join the rows of each group, and fill up with zeros to `rows_per_unit` records."""
        positions, width = groups[0][0].shape
        stacked = groups[0][0].new_zeros(len(groups), self.rows_per_unit * positions, width)
        for row, group in enumerate(groups):
            stacked[row, : len(group) * positions] = torch.cat(group)
        return stacked


def unit_groups(data: LabelledTexts, label: int, rows_per_unit: int) -> list[Group]:
    """List the groups of one class.

    Only the first `rows_per_unit` records of a unit count. Units are in the order of their first records.
    """
    assert data.units is not None
    by_unit: dict[int, list[int]] = {}
    for row in data.first_of_units(rows_per_unit):
        by_unit.setdefault(data.units[row], []).append(row)
    groups: list[Group] = []
    for of_unit in by_unit.values():
        of_class = [row for row in of_unit if data.labels[row] == label]
        if of_class:
            groups.append((of_class, len(of_unit)))
    return groups


def _chunks(groups: list[Group]) -> Iterator[list[Group]]:
    """Split groups into lists of at least `CHUNK` records."""
    chunk: list[Group] = []
    count = 0
    for group in groups:
        chunk.append(group)
        count += len(group[0])
        if count >= CHUNK:
            yield chunk
            chunk, count = [], 0
    if chunk:
        yield chunk
