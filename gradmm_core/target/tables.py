"""Convert target gradients, a probe's moments and token sums to rows of a table, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.errors import InputError
from gradmm.target.probe import Moments
from gradmm.target.token_rates import TokenSums

#: Width of a chunk of a flattened full gradient.
CHUNK = 256


def to_table(
    values: dict[int, Tensor], moments: Moments | None = None, tokens: TokenSums | None = None
) -> pa.Table:
    """Write one row per matrix row. A flat vector is cut into chunks; the last one is padded with zeros.

    Each class sum of a probe is one row of the part "class_sum", each token sum one of the part "token_sum". The
    second moment has the label -1.
    """
    parts = [("gradient", label, _rows(value)) for label, value in values.items()]
    if moments is not None:
        parts += [("class_sum", label, total[None]) for label, total in moments.class_sums.items()]
        if moments.second_moment is not None:
            parts += [("second_moment", -1, moments.second_moment)]
    if tokens is not None:
        parts += [("token_sum", label, total[None]) for label, total in tokens.sums.items()]
    counts = [len(matrix) for _, _, matrix in parts]
    return pa.table(
        {
            "part": pa.array(np.repeat([part for part, _, _ in parts], counts).tolist(), pa.string()),
            "label": np.repeat(np.array([label for _, label, _ in parts], dtype=np.int64), counts),
            "row": np.concatenate([np.arange(n, dtype=np.int64) for n in counts]),
            "values": vectors([matrix for _, _, matrix in parts]),
        }
    )


def matrix_of(table: pa.Table, label: int, part: str = "gradient") -> Float[Tensor, "rows width"]:
    """Read the rows of one part of one label, in order; a full gradient is the padded vector in chunks."""
    of_label = table.filter((pc.field("label") == label) & (pc.field("part") == part)).sort_by("row")
    column = of_label["values"].combine_chunks()
    return torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1).copy())


def moments_of(table: pa.Table, labels: Sequence[int], noise: tuple[float, float | None]) -> Moments:
    """Read the moments from a table that contains them.

    Args:
        noise: the noise's standard deviations in the class sums and in the second moment; None for the latter if
            it is not in the table.

    Raises:
        InputError: if they are of other classes.
    """
    _check_classes(table, labels, "class_sum")
    sums = {label: matrix_of(table, label, "class_sum")[0].double() for label in labels}
    of_sums, of_second_moment = noise
    if of_second_moment is None:
        return Moments(sums, None, of_sums)
    return Moments(sums, matrix_of(table, -1, "second_moment").double(), of_sums, of_second_moment)


def token_sums_of(table: pa.Table, labels: Sequence[int], noise: float) -> TokenSums:
    """Read the token sums from a table that contains them.

    Args:
        noise: the noise's standard deviation in each entry.

    Raises:
        InputError: if they are of other classes.
    """
    _check_classes(table, labels, "token_sum")
    return TokenSums({label: matrix_of(table, label, "token_sum")[0].double() for label in labels}, noise)


def _check_classes(table: pa.Table, labels: Sequence[int], part: str) -> None:
    released = set(table.filter(pc.field("part") == part)["label"].to_pylist())
    if released != set(labels):
        problem = (
            f"the target was released for the labels {sorted(released)}, and the classes are {sorted(labels)}"
        )
        raise InputError(problem, "target_gradient", "give the release of these classes")


def vectors(matrices: Sequence[Tensor]) -> pa.LargeListArray:
    """Concatenate the rows of all matrices as lists; matrices may differ in width."""
    blocks = [matrix.detach().float().cpu().numpy() for matrix in matrices]
    widths = [block.shape[1] for block in blocks for _ in range(len(block))]
    flat = np.concatenate([block.ravel() for block in blocks]) if blocks else np.empty(0, dtype=np.float32)
    offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)  # offsets of a full gradient exceed 2^31
    return pa.LargeListArray.from_arrays(offsets, flat, type=pa.large_list(pa.field("element", pa.float32())))


def _rows(value: Tensor) -> Float[Tensor, "rows width"]:
    if value.ndim == 2:
        return value
    return torch.nn.functional.pad(value, (0, -len(value) % CHUNK)).view(-1, CHUNK)
