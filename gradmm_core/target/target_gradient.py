"""Compute the target: each class's sum of the real examples' clipped gradients, plus noise in a private run.

The same noisy vector contains the sums that the linear probe is fitted to (see `probe`), and those of the texts'
tokens (see `token_rates`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from gradmm.config.settings import TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.gradients.full_gradient import example_gradient
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenIds, TokenisedTemplate, token_counts, tokenise_split
from gradmm.privacy.clipped_sum import MAX_BUILT, RecordSums
from gradmm.privacy.mechanism import MAX_TERM, GaussianMechanism
from gradmm.privacy.sensitivity import ReleaseNorms
from gradmm.target.checkpoint import UnfinishedSums
from gradmm.target.probe import Moments, fit_probe
from gradmm.target.record_batches import RecordBatches
from gradmm.target.tables import to_table
from gradmm.target.target_space import FULL, TargetSpace
from gradmm.target.token_rates import TokenSums
from gradmm.target.unit_groups import UnitGroups


class Released(NamedTuple):
    """The parts of a release: gradients by label, and the moments of a probe and token sums, if there are any."""

    values: dict[int, Tensor]
    moments: Moments | None
    tokens: TokenSums | None


@dataclass(frozen=True)
class TargetSums:
    """The noiseless sums of each class's clipped gradients, and figures about them. All fields are private.

    Attributes:
        values: by label, rows x dimensions of the target's space; flat for the full gradient.
        records: the number of records, by label; of units that have records of this label, if these are clipped
            together.
        ignored: the number of those that count as zero, because their vectors are not finite.
        text_tokens: the mean number of tokens of a text, by label.
        clip_fraction: the share of records whose gradient was clipped.
        norms: the norm to which each part of a record's vector is clipped.
        class_sums, second_moment: the probe's sums, in the units of the release (`norms`); None if not released.
        token_sums: in the units of the release; None if not released.
    """

    values: dict[int, Tensor]
    records: dict[int, int]
    ignored: int
    text_tokens: dict[int, float]
    clip_fraction: float
    norms: ReleaseNorms
    class_sums: dict[int, Tensor] | None = None
    second_moment: Tensor | None = None
    token_sums: dict[int, Tensor] | None = None

    @classmethod
    def of(cls, sums: dict[int, RecordSums], norms: ReleaseNorms, text_tokens: dict[int, float]) -> TargetSums:
        """Combine the sums over each class's records. The probe's second moment is one sum over all classes."""
        records = {label: of_class.records for label, of_class in sums.items()}
        return cls(
            values={label: of_class.gradient.total for label, of_class in sums.items()},
            records=records,
            ignored=sum(of_class.ignored for of_class in sums.values()),
            text_tokens=text_tokens,
            clip_fraction=sum(of_class.gradient.clipped for of_class in sums.values())
            / max(1, sum(records.values())),
            norms=norms,
            class_sums={label: of_class.class_sum.total[0] for label, of_class in sums.items()}
            if norms.class_sum > 0
            else None,
            second_moment=torch.stack([of_class.second_moment.total for of_class in sums.values()]).sum(dim=0)
            if norms.second_moment > 0
            else None,
            token_sums={label: of_class.token_sum.total[0] for label, of_class in sums.items()}
            if norms.token_sum > 0
            else None,
        )

    @property
    def clean(self) -> Released:
        """The noiseless sums in the form of a release."""
        moments = self._moments(self.class_sums, self.second_moment, 0.0)
        return Released(self.values, moments, self._tokens(self.token_sums, 0.0))

    def release(self, mechanism: GaussianMechanism | None) -> Released:
        """Add noise to all sums, which are one vector. Every call draws fresh noise and is one more release."""
        if mechanism is None:
            return self.clean
        values = _noisy(self.values, mechanism)
        moments, tokens = None, None
        # Noise before scaling: the discrete guarantee holds for sums on the sampler's grid.
        if self.class_sums is not None:
            class_sums, second_moment = _noisy(self.class_sums, mechanism), None
            if self.second_moment is not None:
                second_moment = _noisy({-1: self.second_moment}, mechanism)[-1]
            moments = self._moments(class_sums, second_moment, mechanism.sigma)
        if self.token_sums is not None:
            tokens = self._tokens(_noisy(self.token_sums, mechanism), mechanism.sigma)
        return Released(values, moments, tokens)

    def _moments(
        self, class_sums: dict[int, Tensor] | None, second_moment: Tensor | None, sigma: float
    ) -> Moments | None:
        """Convert the sums from the units of the release to those of the features."""
        if class_sums is None:
            return None
        sum_norm, moment_norm = self.norms.class_sum, self.norms.second_moment
        unscaled = {label: total / sum_norm for label, total in class_sums.items()}
        if second_moment is None:
            return Moments(unscaled, None, sigma / sum_norm)
        return Moments(unscaled, second_moment / moment_norm, sigma / sum_norm, sigma / moment_norm)

    def _tokens(self, token_sums: dict[int, Tensor] | None, sigma: float) -> TokenSums | None:
        """Convert the sums from the units of the release to those of `token_presence`."""
        if token_sums is None:
            return None
        norm = self.norms.token_sum
        return TokenSums({label: total / norm for label, total in token_sums.items()}, sigma / norm)

    def cosines(self, noisy: dict[int, Tensor]) -> dict[int, float]:
        """Compute the cosine of each class's noisy and noiseless sum; the centred cosine if sums are centred."""
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
    rows_per_unit: int | None = None,
) -> TargetSums:
    """Sum the records' clipped vectors in one pass over the data, with memory for one batch.

    Formal guarantee: every record enters the sums of one class only, with a vector of norm at most C (the squared
    norms of its parts, `ReleaseNorms`, add up to C^2). All sums together, as one vector, therefore change by at
    most C in norm if a record is added or removed, and by at most 2 C if a record is replaced. With
    `rows_per_unit` the same holds for a unit with all its records (see `unit_groups`).

    In a private run no record can stop the sum: a vector that is not finite counts as zero, and so does a text
    without tokens.

    Args:
        mechanism: releases the sums. For its discrete sampler, records are rounded to its grid.
        unfinished: the checkpoint to resume from and to write. Resuming gives bit-identical sums.
        rows_per_unit: clip the records of each of the data's units together, at most this number of them. None:
            each record is a unit.

    Raises:
        InputError: without a mechanism, if a text has no tokens, or a class's gradients vanish or are not finite;
            with one, if no sensitivity can be stated, see `RecordBatches`, or if the centres are too long.
    """
    private = mechanism is not None
    if mechanism is not None and not mechanism.discrete:
        _check_centres(space, clipping_norm)
    texts = tokenise_split(
        language_model.tokenizer, data.texts, template.max_text_tokens, None if private else "train"
    )
    rows = {label: data.of_class(label) for label in template.labels}
    tokens = token_counts(texts)
    text_tokens = {label: float(tokens[of].sum() / max(1, len(of))) for label, of in rows.items()}
    if settings.matching == "head":
        # A part is released only if the space says how to compute it.
        unmapped = {"probe_share": space.features, "token_share": space.frequencies}
        shares = {name: 0.0 for name, needed in unmapped.items() if needed is None}
        norms = ReleaseNorms.of_target(clipping_norm, settings.model_copy(update=shares))
        record_batches = RecordBatches(language_model, template, space, settings.batch_size, private)
        running = unfinished.read() if unfinished else {}
        for label in template.labels:
            of_class = running.setdefault(label, RecordSums())
            if rows_per_unit is None:
                batches = record_batches(texts, rows[label], label, of_class.records)
            else:
                batches = UnitGroups(record_batches, rows_per_unit)(texts, data, label, of_class.records)
            for _, vectors in batches:
                of_class.add(vectors, norms, mechanism)
                if unfinished:
                    unfinished.write(running)
        # In the order of the classes; a checkpoint has another.
        sums = TargetSums.of({label: running[label] for label in template.labels}, norms, text_tokens)
    else:
        sums = _full_gradient_sums(language_model, template, texts, rows, text_tokens, clipping_norm)
    for label, value in sums.values.items():
        if not private and (not value.isfinite().all() or not value.any()):
            raise InputError(
                f"the gradients of label {label} vanish or are not finite",
                "target_gradient",
                "use another model",
            )
    return sums


def _check_centres(space: TargetSpace, clipping_norm: float) -> None:
    """Check that subtracting a centre from products of factors cannot round a sum by more than `SUM_SLACK` C."""
    longest = max((float(each.norm()) for each in space.centres.values() if each.numel() > MAX_BUILT), default=0.0)
    if 1 + longest / clipping_norm > MAX_TERM:
        at_least = 1.1 * longest / (MAX_TERM - 1)
        raise InputError(
            f"{clipping_norm:g} is too little beside centres of norm {longest:.3g}",
            "privacy.clipping_norm",
            f"set at least {at_least:.2g}, target_gradient.centred=false or privacy.sampler=discrete",
        )


def _full_gradient_sums(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: TokenIds,
    rows: dict[int, Int[np.ndarray, " rows"]],
    text_tokens: dict[int, float],
    clipping_norm: float,
) -> TargetSums:
    values, clipped = {}, 0
    for label, of_class in rows.items():
        values[label], count = _sum_full(language_model, template, texts, of_class, label, clipping_norm)
        clipped += count
    records = {label: len(of_class) for label, of_class in rows.items()}
    share = clipped / max(1, sum(records.values()))
    return TargetSums(values, records, 0, text_tokens, share, ReleaseNorms(clipping_norm))


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
        # A sum in bfloat16 stops growing after some hundred records.
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        norm = float(gradient.norm())
        scaled = gradient * min(1.0, clipping_norm / max(norm, torch.finfo(gradient.dtype).tiny))
        total = scaled if not len(total) else total + scaled
        clipped += norm > clipping_norm
    return total, clipped


def released_target(
    sums: TargetSums, space: TargetSpace, mechanism: GaussianMechanism | None
) -> tuple[pa.Table, dict[str, Any]]:
    """Draw noise, if there is a mechanism, and return the rows and figures of the stage `target_gradient`.

    Every call with a mechanism is one more release. The rows are the release. The figures `records`,
    `text_tokens`, `clip_fraction` and `cosine` are of the records themselves, without noise, and are not released.
    """
    values, moments, tokens = sums.release(mechanism)
    figures: dict[str, Any] = {
        "records": {str(label): count for label, count in sums.records.items()},
        "text_tokens": {str(label): tokens for label, tokens in sums.text_tokens.items()},
        "clip_fraction": sums.clip_fraction,
        "sigma": mechanism.sigma if mechanism else None,
        "cosine": {str(label): cosine for label, cosine in sums.cosines(values).items()},
    }
    if moments is not None:
        assert space.features is not None
        figures |= {
            "class_sum_noise": moments.class_sum_noise,
            "probe_shrinkage": fit_probe(space.features, moments).shrinkage,
        }
        if moments.second_moment is not None:
            figures["second_moment_noise"] = moments.second_moment_noise
    if tokens is not None:
        figures["token_sum_noise"] = tokens.noise
    return to_table(values, moments, tokens), figures
