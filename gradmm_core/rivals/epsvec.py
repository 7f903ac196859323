"""EPSVec: texts of the model, steered by one noisy mean of the data (Banayeeanzade et al., arXiv 2602.21218).

Let h(t) be the mean of the middle layer's hidden state over a text's own tokens, and m and s the mean of h and the
median distance from it over texts that the model writes from all instructions. For each class,

    x(t) = ((h(t) - m) / s clipped to norm 1, 1/2), divided by its largest norm
    released: the sum of x over the class's records, plus noise
    v = (mean of the released x over the class, clipped to norm 1 - the same mean over the model's texts of this
         class), in units of h

and the model writes from the class's instruction with `strength` v added to the middle layer's hidden state at
every position. One release serves any number of texts. The constant 1/2 counts the records. The published code
steers several layers at the last position only, scales the noisy vectors to one length, and shows the model two
examples, which cost a part of epsilon.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pandas as pd
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gradmm.config.settings import GenerationSettings, TargetGradientSettings
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.filters.rows import token_lists
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.last_mlp import layers_of
from gradmm.lm.template import TokenisedTemplate, tokenise_split
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.sensitivity import CONSTANT
from gradmm.rivals.releases import counted_records, exact_sum
from gradmm.rivals.texts import texts_like
from gradmm.storage.artifacts import StageOutput
from gradmm.target.features import TextFeatures, means_in_batches
from gradmm.target.record_batches import RecordBatches
from gradmm.target.tables import matrix_of, to_table
from gradmm.target.target_space import from_table

#: Texts of the model in a forward pass.
BATCH_SIZE = 64


@dataclasses.dataclass(frozen=True, eq=False)
class PublicMeans:
    """Mean hidden states of the model's own texts.

    Attributes:
        features: maps a text's means to (h - m) / s, clipped to norm 1.
        unit: s.
        of_class: the mean of `features` over the texts of each class, by label.
    """

    features: TextFeatures
    unit: float
    of_class: dict[int, Float[Tensor, " hidden"]]


@torch.no_grad()
def public_means(language_model: LanguageModel, template: TokenisedTemplate, texts: pd.DataFrame) -> PublicMeans:
    """Measure the model's own texts.

    Args:
        texts: of the stage `generation`, of all classes.

    Raises:
        InputError: if the texts are all the same, or their hidden states not finite.
    """
    means = torch.zeros(0)
    for rows, of_rows in means_in_batches(language_model, template, token_lists(texts), BATCH_SIZE):
        if not len(means):
            means = of_rows.new_zeros(len(texts), of_rows.shape[1], dtype=torch.float64)
        means[rows] = of_rows.double()
    first, middle, _ = (layer.shape[-1] for layer in language_model.layers(language_model.sample_ids))
    centre = means.mean(dim=0)
    unit = float((means - centre)[:, first : first + middle].norm(dim=1).median())
    if not unit > 1e-9 * float(centre[first : first + middle].norm()):  # also if one is NaN
        problem = "the model's own texts are all the same, or their hidden states are not finite"
        raise InputError(problem, "model.dtype", "set it to float32, or leave epsvec out of the arms")
    of_middle = torch.zeros(middle, means.shape[1], dtype=torch.float64, device=means.device)
    of_middle[:, first : first + middle] = torch.eye(middle) / unit
    features = TextFeatures(centre, of_middle)
    mapped, labels = features(means), texts["label"].to_numpy()
    return PublicMeans(features, unit, {label: mapped[labels == label].mean(dim=0) for label in template.labels})


@torch.no_grad()
def class_sums(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    features: TextFeatures,
    data: LabelledTexts,
    space: StageOutput | None,
    matching: TargetGradientSettings,
    mechanism: GaussianMechanism,
) -> dict[int, Float[Tensor, " features"]]:
    """Sum x over the records of each class; private.

    Formal guarantee: a record enters the sum of one class, with a vector of norm at most 1 that depends on this
    record and on public texts alone. A record whose hidden states are not finite enters none.

    Args:
        mechanism: adds the noise to these sums later.
    """
    table = None if space is None else space.read_table()
    where = from_table(table, template, matching, language_model.device)
    where = dataclasses.replace(where, features=features, frequencies=None)
    batches = RecordBatches(language_model, template, where, matching.batch_size, private=True)
    tokens = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, None)

    def of_class(label: int) -> Iterator[Float[Tensor, "records features"]]:
        for part, vectors in batches(tokens, data.of_class(label), label):
            assert vectors.features is not None  # the space has features
            each = vectors.features[: len(part), 0].cpu()
            yield each[each.isfinite().all(dim=1)]

    size = len(features.map) + 1
    return {label: torch.from_numpy(exact_sum(of_class(label), size, mechanism)) for label in template.labels}


def released_vectors(
    sums: Mapping[int, Float[Tensor, " features"]], public: PublicMeans, mechanism: GaussianMechanism
) -> tuple[pa.Table, dict[str, Any]]:
    """Add noise to all classes' sums, which are one vector of sensitivity 1, and turn them into vectors v.

    Every call draws fresh noise: one more release.

    Returns:
        The vector v of each class, and the noisy number of its records with the noise's standard deviation: the
        rows and figures of the stage `private_means`.
    """
    exact = torch.stack([*sums.values()])
    noisy = exact + torch.from_numpy(mechanism.noise(tuple(exact.shape)))
    largest_norm = (1 + CONSTANT**2) ** 0.5
    noisy = noisy * largest_norm
    vectors, records = {}, {}
    for label, total in zip(sums, noisy, strict=True):
        records[label] = float(total[-1]) / CONSTANT
        mean = total[:-1] / max(1.0, records[label])
        mean = mean / max(1.0, float(mean.norm()))  # that of any records is no longer
        vectors[label] = public.unit * (mean - public.of_class[label].cpu())
    table = to_table({label: vector[None] for label, vector in vectors.items()})
    counted = counted_records(records, dict.fromkeys(records, mechanism.sigma * largest_norm / CONSTANT))
    return table, counted | {"length": {str(label): float(vector.norm()) for label, vector in vectors.items()}}


def middle_layer(language_model: LanguageModel) -> nn.Module:
    """Return the layer whose input is the middle hidden state of `LanguageModel.layers`.

    Raises:
        InputError: if the model has none of that kind.
    """
    layers = layers_of(language_model.model.base_model)
    middle = (len(layers) + 1) // 2
    seen: list[Tensor] = []
    if middle < len(layers):
        with _before(layers[middle], lambda hidden: (seen.append(hidden), hidden)[1]), torch.no_grad():
            expected = language_model.layers(language_model.sample_ids)[1]
        if len(seen) == 1 and torch.equal(seen[0], expected):
            return layers[middle]
    raise InputError(
        "the model has no middle layer that can be steered", "model.name", "leave epsvec out of the arms"
    )


@contextmanager
def steered(layer: nn.Module, vector: Float[Tensor, " hidden"]) -> Iterator[None]:
    """Add a vector to the hidden state that a layer reads, at every position, while the context is active."""
    with _before(layer, lambda hidden: hidden + vector.to(hidden)):
        yield


@contextmanager
def _before(layer: nn.Module, change: Any) -> Iterator[None]:
    """Change the hidden states that a layer reads while the context is active."""

    def hook(_layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return inputs, named | {"hidden_states": change(named["hidden_states"])}

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def steered_texts(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    texts: pd.DataFrame,
    released: pa.Table,
    instructions: Mapping[int, str],
    text_tokens: Mapping[int, int],
    generation: GenerationSettings,
    strength: float,
    seed: int,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Write as many texts of each class as `texts` has: the rows and figures of the stage `steered_texts`.

    Texts that contain a class's answer are left out.

    Args:
        texts: of the stage `generation`; their ids and classes are kept.
        released: of the stage `private_means`.
        text_tokens: the length to which texts are written before they are cut, by label.
    """
    layer = middle_layer(language_model)

    def steering(label: int) -> AbstractContextManager[None]:
        return steered(layer, strength * matrix_of(released, label)[0])

    return texts_like(
        texts, language_model, language_model, template, instructions, text_tokens, generation, seed, steering
    )
