"""Soft labels weighted by the classes' shares of the records, where a rival's release counts these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch

from gradmm.labelling.labelling import labelled_texts, labelling_figures, probability_matrix
from gradmm.labelling.teacher import log_class_shares


def with_class_shares(
    texts: pd.DataFrame, records: Mapping[int, float], deviations: Mapping[int, float], names: Mapping[int, str]
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Multiply p(c | text) by the classes' shares: the rows and figures of the stage `class_shares`.

    Post-processing of a release, which costs no privacy.

    Args:
        texts: of the stage `labelling`, with probabilities that assume equal shares.
        records: noisy numbers of records, by label; the noise of one may exceed it.
        deviations: standard deviations of their noise.
        names: class names by label, in the order of the probabilities.
    """
    counts = torch.tensor([records[label] for label in names], dtype=torch.float64)
    noise = torch.tensor([deviations[label] for label in names], dtype=torch.float64)
    log_shares = log_class_shares(counts, noise)
    logs = torch.from_numpy(probability_matrix(texts)).log() + log_shares
    as_written = texts.drop(columns=["probabilities"]).assign(label=texts["written_for"])
    labelled = labelled_texts(as_written, logs.softmax(dim=1).numpy(), names)
    shares = dict(zip(map(str, names), log_shares.exp().tolist(), strict=True))
    return labelled, labelling_figures(labelled, names) | {"class_shares": shares}
