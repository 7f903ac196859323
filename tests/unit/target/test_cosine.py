"""Compare the cosine of two targets with plain loops."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gradmm.target.cosine import target_cosine


def rows(values: np.ndarray) -> pd.DataFrame:
    """Make a target of two classes with two rows each, and a row of a probe whose width depends on the values."""
    places = [(label, row) for label in (0, 1) for row in (0, 1)]
    gradients = pd.DataFrame(
        {"label": [p[0] for p in places], "row": [p[1] for p in places], "values": list(values.reshape(4, -1))}
    )
    of_probe = {
        "part": "second_moment",
        "label": -1,
        "row": 0,
        "values": np.full(int(abs(values[0]) * 9) + 1, 7.0),
    }
    return pd.concat([gradients.assign(part="gradient"), pd.DataFrame([of_probe])])


def test_all_classes_are_one_vector_in_any_order_of_rows() -> None:
    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, 12)).astype(np.float32)
    dot = sum(float(a) * float(b) for a, b in zip(first, second, strict=True))
    norms = [sum(float(a) ** 2 for a in each) ** 0.5 for each in (first, second)]
    shuffled = rows(second).sample(frac=1, random_state=1)
    assert target_cosine(rows(first), shuffled) == pytest.approx(dot / norms[0] / norms[1], rel=1e-12)
    assert target_cosine(rows(first), rows(3 * first)) == pytest.approx(1.0)
    assert target_cosine(rows(first), rows(0 * first)) == 0.0


def test_targets_in_different_spaces_are_refused() -> None:
    target = rows(np.ones(8))
    with pytest.raises(ValueError, match="spaces"):
        target_cosine(target, target[1:])
