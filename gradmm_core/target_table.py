"""Target gradients as rows of a table, and back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor

#: Width of a chunk of a flattened full gradient.
CHUNK = 256


def to_table(values: dict[int, Tensor]) -> pa.Table:
    """One row per row of a class's matrix; a flat vector is cut into chunks, the last one padded with zeros."""
    blocks = [_rows(value) for value in values.values()]
    counts = [len(block) for block in blocks]
    flat = np.concatenate(blocks)
    return pa.table(
        {
            "label": np.repeat(np.array(list(values), dtype=np.int64), counts),
            "row": np.concatenate([np.arange(n, dtype=np.int64) for n in counts]),
            "values": pa.FixedSizeListArray.from_arrays(flat.ravel(), flat.shape[1]),
        }
    )


def matrix_of(table: pa.Table, label: int) -> Float[Tensor, "rows width"]:
    """One class's rows, in order. For a full gradient: the padded vector, cut into chunks."""
    of_label = table.filter(pc.field("label") == label).sort_by("row")
    column = of_label["values"].combine_chunks()
    return torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1).copy())


def _rows(value: Tensor) -> np.ndarray:
    array = value.detach().float().cpu().numpy()
    if array.ndim == 2:
        return array
    return np.pad(array, (0, -len(array) % CHUNK)).reshape(-1, CHUNK)
