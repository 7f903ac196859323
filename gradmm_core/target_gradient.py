"""The target: for each class, the sum of its real examples' clipped gradients, plus noise when private.

With it, in the same noisy vector, the sums that a probe is made of (`probe`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from gradmm_core.clipped_sum import RecordSums
from gradmm_core.data import LabelledTexts
from gradmm_core.errors import InputError
from gradmm_core.full_gradient import example_gradient
from gradmm_core.head_gradient import HeadGradients
from gradmm_core.language_model import LanguageModel
from gradmm_core.privacy import GaussianMechanism
from gradmm_core.probe import Moments
from gradmm_core.release_norms import ReleaseNorms
from gradmm_core.settings import TargetGradientSettings
from gradmm_core.target_space import FULL, TargetSpace
from gradmm_core.template import (
    TokenIds,
    TokenisedTemplate,
    head_gradients,
    length_bucketed,
    make_batch,
    tokenise_split,
)
from gradmm_core.text_features import text_means
from gradmm_core.unfinished_sums import UnfinishedSums


@dataclass(frozen=True)
class TargetSums:
    """The clean sum of each class's clipped gradients (rows x dimensions of the target's space; flat for the full
    gradient), and what went into it. All of it is read off the private data.

    Attributes:
        class_sums, second_moment: what a probe is made of, in the units of the release (`norms`); None without.
    """

    values: dict[int, Tensor]
    records: dict[int, int]
    text_tokens: dict[int, float]
    clip_fraction: float
    norms: ReleaseNorms
    class_sums: dict[int, Tensor] | None = None
    second_moment: Tensor | None = None

    @property
    def moments(self) -> Moments | None:
        """Of the clean sums; None without a probe."""
        return self._moments(self.class_sums, self.second_moment, 0.0)

    def release(self, mechanism: GaussianMechanism | None) -> tuple[dict[int, Tensor], Moments | None]:
        """All classes' sums, and a probe's, as one noisy vector. Every call draws anew: it is one more release."""
        if mechanism is None:
            return self.values, self.moments
        values = _noisy(self.values, mechanism)
        if self.class_sums is None or self.second_moment is None:
            return values, None
        # Noise first: a sum on the discrete sampler's grid stays there until it has its noise.
        class_sums = _noisy(self.class_sums, mechanism)
        second_moment = _noisy({-1: self.second_moment}, mechanism)[-1]
        return values, self._moments(class_sums, second_moment, mechanism.sigma)

    def _moments(
        self, class_sums: dict[int, Tensor] | None, second_moment: Tensor | None, sigma: float
    ) -> Moments | None:
        """In the units of the features."""
        if class_sums is None or second_moment is None:
            return None
        _, of_sums, of_second = self.norms
        unscaled = {label: total / of_sums for label, total in class_sums.items()}
        return Moments(unscaled, second_moment / of_second, sigma / of_sums, sigma / of_second)

    def cosines(self, noisy: dict[int, Tensor]) -> dict[int, float]:
        """Of each class's noisy and clean target: the centred cosine where targets are centred."""
        return {
            label: float(F.cosine_similarity(value.flatten().double(), noisy[label].flatten().double(), dim=0))
            for label, value in self.values.items()
        }


def _noisy(sums: dict[int, Tensor], mechanism: GaussianMechanism) -> dict[int, Tensor]:
    clean = torch.stack(list(sums.values())).double()
    noisy = clean + torch.from_numpy(mechanism.noise(tuple(clean.shape)))
    return dict(zip(sums, noisy, strict=True))


def target_sums(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    data: LabelledTexts,
    settings: TargetGradientSettings,
    clipping_norm: float,
    mechanism: GaussianMechanism | None,
    space: TargetSpace = FULL,
    unfinished: UnfinishedSums | None = None,
) -> TargetSums:
    """One pass over the data at memory O(batch).

    Formal guarantee: every record enters one class's sums, with a vector of norm at most C (its parts' squared
    norms, `ReleaseNorms`, add up to C^2), so that all sums together change by at most C when a record is added or
    removed and by at most 2 C when one is replaced.

    Args:
        mechanism: the one that will release the sums; with its discrete sampler they are made on its grid.
        unfinished: where to go on from, and what to leave for whoever has to. The result is the same bits.

    Raises:
        InputError: if a text has no tokens, or a class's gradients vanish.
    """
    texts = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, "train")
    rows = {label: np.array(data.of_class(label), dtype=np.int64) for label in template.labels}
    norms = ReleaseNorms.of(clipping_norm, 0.0 if space.features is None else settings.probe_share)
    running = unfinished.read() if unfinished else {}
    sums: dict[int, Tensor] = {}
    clipped = 0
    for label in template.labels:
        if settings.matching == "head":
            of_class = running.setdefault(label, RecordSums())
            batches = _records(
                language_model,
                template,
                texts,
                rows[label],
                label,
                settings,
                space,
                skip=of_class.gradient.records,
            )
            for gradients, features in batches:
                of_class.add(gradients, features, norms, mechanism)
                if unfinished:
                    unfinished.write(running)
            sums[label], count = of_class.gradient.total, of_class.gradient.clipped
        else:
            sums[label], count = _sum_full(language_model, template, texts, rows[label], label, clipping_norm)
        clipped += count
        if not sums[label].isfinite().all() or not sums[label].any():
            raise InputError(
                f"the gradients of label {label} vanish or are not finite",
                "target_gradient",
                "use another model",
            )
    return TargetSums(
        values=sums,
        records={label: len(rows[label]) for label in sums},
        text_tokens={label: float(texts.lengths[rows[label]].mean()) for label in sums},
        clip_fraction=clipped / len(data),
        norms=norms,
        class_sums={label: running[label].class_sum.total[0] for label in sums} if space.features else None,
        second_moment=torch.stack([running[label].second_moment.total for label in sums]).sum(dim=0)
        if space.features
        else None,
    )


@torch.no_grad()
def _records(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: TokenIds,
    rows: Int[np.ndarray, " rows"],
    label: int,
    settings: TargetGradientSettings,
    space: TargetSpace,
    skip: int,
) -> Iterator[tuple[HeadGradients, Float[Tensor, "records features"] | None]]:
    """Gradients, and a probe's features, of all these rows' texts but the `skip` shortest."""
    batches = length_bucketed(texts.lengths[rows], settings.batch_size, skip)
    for part in tqdm(batches, desc=f"target gradient, label {label}", unit="batch", disable=None, leave=False):
        batch = make_batch(
            template, [texts[i] for i in rows[part].tolist()], [label] * len(part), language_model.device
        )
        features, hidden = None, None
        if space.features is not None:
            layers = language_model.layers(input_ids=batch.input_ids)
            features = space.features.with_constant(text_means(layers, batch.text_mask))
            hidden = layers[-1]
        yield space.project(head_gradients(language_model, batch, hidden).double(), label), features


def _sum_full(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: TokenIds,
    rows: Int[np.ndarray, " rows"],
    label: int,
    clipping_norm: float,
) -> tuple[Float[Tensor, " parameters"], int]:
    total = torch.zeros(0)
    clipped = 0
    for row in tqdm(rows.tolist(), desc=f"target gradient, label {label}", unit="text", disable=None, leave=False):
        gradient = example_gradient(language_model, template, texts[row], label)
        norm = float(gradient.norm())
        scaled = gradient * min(1.0, clipping_norm / max(norm, torch.finfo(gradient.dtype).tiny))
        total = scaled if not len(total) else total + scaled
        clipped += norm > clipping_norm
    return total, clipped
