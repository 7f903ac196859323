"""The target: for each class, the sum of its real examples' clipped gradients, plus noise when private."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from gradmm_core.data import LabelledTexts
from gradmm_core.errors import InputError
from gradmm_core.full_gradient import example_gradient
from gradmm_core.language_model import LanguageModel
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.template import (
    TokenisedTemplate,
    head_gradients,
    length_bucketed,
    make_batch,
    tokenise_texts,
)


@dataclass(frozen=True)
class TargetGradients:
    """The target of each class (vocab x width, or one flat vector for the full gradient), and what made it.

    All but `values` is read off the private data: it belongs in the private report, never in a release.
    """

    values: dict[int, Tensor]
    records: dict[int, int]
    text_tokens: dict[int, float]
    clip_fraction: float


def target_gradients(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    data: LabelledTexts,
    settings: TargetGradientSettings,
    clipping_norm: float,
    mechanism: GaussianMechanism | None,
) -> TargetGradients:
    """One pass over the data at memory O(batch).

    Formal guarantee: every record enters one class's sum, with norm at most C, so that all classes' sums
    together change by at most C when a record is added or removed and by at most 2 C when one is replaced.
    With a mechanism, its noise is added to all of them: one release.

    Raises:
        InputError: if a text has no tokens, or a class's gradients vanish.
    """
    texts = tokenise_texts(language_model.tokenizer, data.texts, template.max_text_tokens, "train")
    sums: dict[int, Tensor] = {}
    clipped = 0
    for label in template.labels:
        rows = data.of_class(label)
        sum_class = _sum_head if settings.matching == "head" else _sum_full
        class_texts = [texts[i] for i in rows]
        sums[label], count = sum_class(language_model, template, class_texts, label, settings, clipping_norm)
        clipped += count
        if not sums[label].isfinite().all() or not sums[label].any():
            raise InputError(
                f"the gradients of label {label} vanish or are not finite",
                "target_gradient",
                "use another model",
            )
    noisy = _release(sums, mechanism)
    return TargetGradients(
        values=noisy,
        records={label: len(data.of_class(label)) for label in sums},
        text_tokens={label: float(np.mean([len(texts[i]) for i in data.of_class(label)])) for label in sums},
        clip_fraction=clipped / len(data),
    )


@torch.no_grad()
def _sum_head(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: list[list[int]],
    label: int,
    settings: TargetGradientSettings,
    clipping_norm: float,
) -> tuple[Float[Tensor, "vocab width"], int]:
    total = torch.zeros_like(language_model.head)
    clipped = 0
    batches = length_bucketed([len(t) for t in texts], settings.batch_size)
    for rows in tqdm(batches, desc=f"target gradient, label {label}", unit="batch", disable=None, leave=False):
        batch = make_batch(template, [texts[i] for i in rows], [label] * len(rows), language_model.device)
        gradients = head_gradients(language_model, batch)
        total += gradients.clipped_sum(clipping_norm)
        clipped += int((gradients.clip_scales(clipping_norm) < 1).sum())
    return total, clipped


def _sum_full(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: list[list[int]],
    label: int,
    settings: TargetGradientSettings,
    clipping_norm: float,
) -> tuple[Float[Tensor, " parameters"], int]:
    total = torch.zeros(0)
    clipped = 0
    for text in tqdm(texts, desc=f"target gradient, label {label}", unit="text", disable=None, leave=False):
        gradient = example_gradient(language_model, template, text, label)
        norm = float(gradient.norm())
        scaled = gradient * min(1.0, clipping_norm / max(norm, torch.finfo(gradient.dtype).tiny))
        total = scaled if not len(total) else total + scaled
        clipped += norm > clipping_norm
    return total, clipped


def _release(sums: dict[int, Tensor], mechanism: GaussianMechanism | None) -> dict[int, Tensor]:
    """All classes' sums as one noisy vector."""
    if mechanism is None:
        return sums
    stacked = torch.stack(list(sums.values())).cpu()
    noise = torch.from_numpy(mechanism.noise(tuple(stacked.shape)))
    noisy = (stacked.double() + noise).to(stacked.dtype)
    return dict(zip(sums, noisy, strict=True))
