"""Make the target space: a linear map of the head gradient and a centre for each class, from public material only.

The norm of the noise grows with the square root of the number of coordinates; the signal does not. The gradient G
(vocab x width) is therefore mapped to fewer coordinates before it is clipped:

    full              G                      vocab x width          the paper
    label-rows        G[rows]                rows x width           `rows`: the response tokens of all classes
    public-subspace   G[rows] Q              rows x k               Q: leading directions of public hidden states

The public material is text that the model itself writes from the recipe's instructions. Its gradient accounts for
most of a class's gradient. With `centred`, the mean gradient of the class's public text is subtracted from each
example's gradient before clipping, so that only the data's difference from it is released. Texts then match the
mean gradient that follows (`mean_gradient`), or the difference itself.

If a probe is released with the target, the space also contains the map from a text's hidden states to features; if
token rates are, it contains the tokens' document frequencies in public text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from gradmm.config.settings import TargetGradientSettings
from gradmm.errors import InputError
from gradmm.gradients.head_gradient import HeadGradients, head_gradients, products_one_by_one
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import PromptCache
from gradmm.lm.sampling import write_texts
from gradmm.lm.template import Batch, TokenisedTemplate, make_batch
from gradmm.lm.vocabulary import allowed_tokens
from gradmm.target.features import TextFeatures, text_means
from gradmm.target.tables import matrix_of, vectors
from gradmm.target.token_rates import document_frequencies

#: Public text is the same in every run: the recipe's seed must not change the target space.
SEED = 0

#: The tokens of public texts.
PUBLIC_LANGUAGE = "any"

#: The public texts that each model wrote last, with what they were asked for by.
_PUBLIC_TEXTS: WeakKeyDictionary[LanguageModel, tuple[tuple[Any, ...], dict[int, list[list[int]]]]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class TargetSpace:
    """The map and, in its coordinates, the centre of each class.

    `rows` is None if all rows are kept, `basis` if all columns are, `features` if there is no probe. `frequencies`
    are the tokens' document frequencies in the public texts of all classes alike; None if no rates are released.
    """

    rows: Int[Tensor, " rows"] | None
    basis: Float[Tensor, "width dimensions"] | None
    centres: dict[int, Float[Tensor, "rows dimensions"]]
    features: TextFeatures | None = None
    frequencies: Float[Tensor, " vocabulary"] | None = None

    def project(self, gradients: HeadGradients, label: int) -> HeadGradients:
        """Map the gradients of a batch of one class's examples to this space, and subtract the class's centre."""
        residual, hidden = gradients.residual, gradients.hidden
        if self.rows is not None:
            residual = residual[..., self.rows]
        if self.basis is not None:
            hidden = products_one_by_one(hidden, self.basis.to(hidden))
        centre = self.centres.get(label)
        return HeadGradients(residual, hidden, None if centre is None else centre.to(hidden))

    def mean_gradient(
        self,
        difference: Float[Tensor, "rows dimensions"],
        label: int,
        records: float,
        clip_scale: float,
        shrinkage: float,
    ) -> Float[Tensor, "rows dimensions"]:
        """Estimate the data's mean gradient from the released sum of clipped differences from the centre.

        Args:
            records: the class's number of records, counted or declared.
            clip_scale: the mean factor of clipping, see `PublicStatistics`.
            shrinkage: the factor of the difference, see `difference_shrinkage`. At 0 the centre is returned.
        """
        return self.centres[label] + shrinkage * difference / (records * clip_scale)

    def without_centres(self) -> TargetSpace:
        return replace(self, centres={})


#: The whole head without centres: the paper's space.
FULL = TargetSpace(None, None, {})


def difference_shrinkage(
    difference: Float[Tensor, "rows dimensions"], records: float, clipping_norm: float, sigma: float
) -> float:
    """Compute the positive-part James-Stein shrinkage factor (1961) of a class's released difference, in [0, 1].

    It is the share of the mean difference's squared norm that chance does not explain. Sampling N records of norm
    at most C adds at most C^2 / N to the expected squared norm; the release's noise adds sigma^2 / N^2 in each
    coordinate.

    Args:
        difference: the sum over the class's N = `records` records, each clipped to C = `clipping_norm`.
        sigma: standard deviation of the noise in each coordinate; 0 without noise.
    """
    by_chance = clipping_norm**2 / records + sigma**2 * difference.numel() / records**2
    squared = float((difference / records).square().sum())
    return max(0.0, 1 - by_chance / squared) if squared else 0.0


def label_rows(template: TokenisedTemplate) -> list[int]:
    """List the response tokens of all classes, each once, in order."""
    return list(dict.fromkeys(token for response in template.responses.values() for token in response))


@dataclass(frozen=True)
class PublicStatistics:
    """Statistics of one class's gradients in the space, over public text.

    Attributes:
        unclipped: norm of the mean gradient.
        plain: norm of the mean gradient that can be computed from a release: clipped unless the space is centred.
        clip_scale: mean of min(1, C / ||g - centre||).
    """

    unclipped: float
    plain: float
    clip_scale: float


def space_of_public_text(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    instructions: dict[int, str],
    settings: TargetGradientSettings,
    clipping_norm: float,
) -> tuple[pa.Table, dict[str, Any]]:
    """Write public texts and make the target space of them: the rows and figures of the stage `target_space`.

    Args:
        instructions: of the classes, by label.
        settings: with a number for `probe_dimensions`.
        clipping_norm: of the gradient part of a record's vector.
    """
    texts = public_texts(language_model, template, instructions, settings)
    space, statistics = make_target_space(
        language_model, template, texts, settings, clipping_norm, settings.directions
    )
    if settings.token_share > 0:
        allowed = allowed_tokens(language_model, PUBLIC_LANGUAGE, spaceless_words=False)
        of_classes = [
            document_frequencies(language_model, allowed, instructions[label], texts[label]) for label in texts
        ]
        space = replace(space, frequencies=torch.stack(of_classes).mean(dim=0))
    rows = language_model.head.shape[0] if space.rows is None else len(space.rows)
    columns = language_model.head.shape[1] if space.basis is None else space.basis.shape[1]
    figures = {
        "coordinates": rows * columns,
        "probe_dimensions": None if space.features is None else len(space.features.map),
        **{
            field.name: {str(label): getattr(of_label, field.name) for label, of_label in statistics.items()}
            for field in fields(PublicStatistics)
        },
    }
    return to_table(space), figures


def public_texts(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    instructions: dict[int, str],
    settings: TargetGradientSettings,
) -> dict[int, list[list[int]]]:
    """Write texts for each class from its instruction; return their token ids by label.

    The last texts of a model are kept in memory: a run needs them for the space and again for every labelling, and
    writing them takes longer than labelling.
    """
    tokens = min(settings.public_text_tokens, template.max_text_tokens)
    wanted = (tuple(instructions.items()), settings.public_texts, tokens)
    written = _PUBLIC_TEXTS.get(language_model)
    if written is None or written[0] != wanted:
        written = wanted, _write_public_texts(language_model, instructions, settings.public_texts, tokens)
        _PUBLIC_TEXTS[language_model] = written
    return written[1]


def _write_public_texts(
    language_model: LanguageModel, instructions: dict[int, str], texts: int, tokens: int
) -> dict[int, list[list[int]]]:
    allowed = allowed_tokens(language_model, PUBLIC_LANGUAGE, spaceless_words=False)
    uniforms = np.random.default_rng(SEED).random((texts, tokens))
    prompt_caches = {label: PromptCache(language_model, words) for label, words in instructions.items()}
    for prompt_cache in prompt_caches.values():
        prompt_cache.check_room(tokens, "target_gradient.public_text_tokens")
    return {
        label: write_texts(
            language_model, allowed, prompt_cache, uniforms, title=f"public texts, label {label}"
        ).tolist()
        for label, prompt_cache in prompt_caches.items()
    }


@torch.no_grad()
def make_target_space(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: dict[int, list[list[int]]],
    settings: TargetGradientSettings,
    clipping_norm: float,
    probe_dimensions: int | None = None,
) -> tuple[TargetSpace, dict[int, PublicStatistics]]:
    """Compute basis, centres and statistics from public texts' gradients, and features from their hidden states.

    Args:
        texts: token ids of public texts, by label.
        clipping_norm: of the gradient part of a record's vector.
        probe_dimensions: the largest number of features; None without a probe.
    """
    passes = 2 + (settings.space == "public-subspace") + (not settings.centred) + (probe_dimensions is not None)
    total = passes * sum(map(len, texts.values()))

    def batches(label: int) -> Iterator[Batch]:
        for start in range(0, len(texts[label]), settings.batch_size):
            part = texts[label][start : start + settings.batch_size]
            yield make_batch(template, part, [label] * len(part), language_model.device)
            bar.update(len(part))

    # Recomputed on each call: with a large vocabulary, one class's gradients would not fit in memory.
    def gradients(label: int, space: TargetSpace) -> Iterator[HeadGradients]:
        for batch in batches(label):
            yield space.project(head_gradients(language_model, batch).double(), label)

    with tqdm(total=total, desc="target space", unit="text", disable=None, leave=False) as bar:
        space = TargetSpace(_rows(template, settings, language_model.device), None, {})
        if settings.space == "public-subspace":
            batches_of_all = (batch for label in texts for batch in gradients(label, space))
            space = replace(space, basis=_leading_directions(batches_of_all, settings.subspace_dimensions))
        means = {label: _mean(gradients(label, space), None, len(texts[label])) for label in texts}
        if settings.centred:
            space = replace(space, centres=means)
        if probe_dimensions is not None:
            public = [
                text_means(language_model.layers(input_ids=batch.input_ids), batch.text_mask)
                for label in texts
                for batch in batches(label)
            ]
            space = replace(space, features=TextFeatures.of_public(torch.cat(public).cpu(), probe_dimensions))
        statistics = {}
        for label in texts:
            plain = means[label]
            if not settings.centred:
                plain = _mean(gradients(label, space), clipping_norm, len(texts[label]))
            scales = torch.cat([batch.clip_scales(clipping_norm) for batch in gradients(label, space)])
            statistics[label] = PublicStatistics(
                float(means[label].norm()), float(plain.norm()), float(scales.mean())
            )
    return space, statistics


def _mean(
    batches: Iterator[HeadGradients], clipping_norm: float | None, count: int
) -> Float[Tensor, "rows dimensions"]:
    total = torch.zeros(())
    for batch in batches:
        total = total + batch.clipped_sum(clipping_norm)
    _check_finite(total)
    return total / count


def _check_finite(total: Tensor) -> None:
    if not total.isfinite().all():
        fix = "set model.dtype=float32, or use another model"
        raise InputError("gradients of the model's own text are not finite", "target_space", fix)


def _leading_directions(batches: Iterator[HeadGradients], count: int) -> Float[Tensor, "width dimensions"]:
    """Compute the leading right singular vectors of the hidden states at response positions."""
    gram = torch.zeros(())
    for batch in batches:
        present = batch.residual.abs().sum(dim=2, keepdim=True) > 0  # false at padding
        hidden = (batch.hidden * present).flatten(0, 1)
        gram = gram + hidden.mT @ hidden
    _check_finite(gram)
    vectors = torch.linalg.eigh(gram.cpu()).eigenvectors  # ascending
    return vectors[:, -count:].flip(1)


def _rows(
    template: TokenisedTemplate, settings: TargetGradientSettings, device: torch.device
) -> Int[Tensor, " rows"] | None:
    return None if settings.space == "full" else torch.tensor(label_rows(template), device=device)


def to_table(space: TargetSpace) -> pa.Table:
    """Write the rows of the basis, of each class's centre, of the features' mean and map, and of the frequencies.

    The label is -1 where a part has none.
    """
    parts = ([] if space.basis is None else [("basis", -1, space.basis)]) + [
        ("centre", label, centre) for label, centre in space.centres.items()
    ]
    if space.features is not None:
        parts += [("feature_mean", -1, space.features.mean[None]), ("feature_map", -1, space.features.map)]
    if space.frequencies is not None:
        parts.append(("document_frequency", -1, space.frequencies[None]))
    counts = [len(matrix) for _, _, matrix in parts]
    return pa.table(
        {
            "part": pa.array(np.repeat([name for name, _, _ in parts], counts).tolist(), pa.string()),
            "label": np.repeat(np.array([label for _, label, _ in parts], dtype=np.int64), counts),
            "row": np.concatenate([np.arange(n, dtype=np.int64) for n in [*counts, 0]]),
            "values": vectors([matrix for _, _, matrix in parts]),
        }
    )


def from_table(
    table: pa.Table | None,
    template: TokenisedTemplate,
    settings: TargetGradientSettings,
    device: torch.device,
) -> TargetSpace:
    """Read the stored space, so that target and texts are projected with the same numbers."""
    rows = _rows(template, settings, device)
    if table is None:
        return TargetSpace(rows, None, {})
    basis = _matrix(table, "basis", -1).to(device) if settings.space == "public-subspace" else None
    labels = template.labels if settings.centred else []
    centres = {label: _matrix(table, "centre", label).to(device) for label in labels}
    frequencies = frequencies_from_table(table) if settings.token_share > 0 else None
    return TargetSpace(rows, basis, centres, features_from_table(table, device), frequencies)


def features_from_table(table: pa.Table, device: torch.device) -> TextFeatures | None:
    """Read the probe's feature map; None if the space has none."""
    if "feature_map" not in table["part"].unique().to_pylist():
        return None
    mean, map_ = (_matrix(table, part, -1).to(device) for part in ("feature_mean", "feature_map"))
    return TextFeatures(mean[0], map_)


def frequencies_from_table(table: pa.Table) -> Float[Tensor, " vocabulary"] | None:
    """Read the tokens' document frequencies in public text; None if the space has none."""
    if "document_frequency" not in table["part"].unique().to_pylist():
        return None
    return _matrix(table, "document_frequency", -1)[0]


def _matrix(table: pa.Table, part: str, label: int) -> Float[Tensor, "rows columns"]:
    return matrix_of(table, label, part)
