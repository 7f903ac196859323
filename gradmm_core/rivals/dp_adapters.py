"""DP adapters: texts of the model after DP-SGD on a few of its weights (Kurakin et al., arXiv 2306.01684).

Each linear layer's W becomes W + 2 B A (LoRA). B begins at zero and is trained; A is random and fixed, so that the
noise enters each product once (FFA-LoRA, Sun et al., ICLR 2024). All classes share the weights w, which are all B,
and a record's class enters by its instruction. The records take part in P passes of K steps:

    pass: every record is assigned to one of the K steps at random
    step: x_i = the gradient by w of record i's mean loss per token after its class's instruction, over its norm
          s = sum of x_i over the step's records + noise of standard deviation sigma sqrt(P)
          w moves by Adam along s

The last w is released, and with it the model writes any number of texts from each class's instruction.

A record is in one sum of each pass, with a vector of norm 1 (automatic clipping, Bu et al., NeurIPS 2023). The
steps of a pass are one Gaussian mechanism, as a record is in only one of them, and the passes compose exactly to
the claim (Dong, Roth and Su, 2022), later ones depending on earlier results too. With K = 1 each step has all
records, and the noise is least in relation to the mean gradient; with P = 2 and K = 4 it is twice as large, for a
quarter of the time. DP-SGD usually draws Poisson samples: eight steps of a quarter of the records have 1.2 times
that least noise under epsilon 1, and as much under 0.05. But the ledger composes Gaussian mechanisms, which an
amplified run is not.

Opacus is not used. Some layers (OPT's) see the tokens of all records in one dimension, and it takes each token for
a record there; and its noise cannot be discrete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm

from gradmm.data.splits import LabelledTexts
from gradmm.evaluation.trainable import adapted_model
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt import prompt_ids
from gradmm.lm.template import TokenisedTemplate, tokenise_split
from gradmm.lm.token_passes import ComputeMeter
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.rivals.releases import mechanism_of_part, noisy_sum
from gradmm.target.independent_rows import independent_rows
from gradmm.target.record_batches import padded_length

#: Records in a forward pass; 1 where a row may depend on the others. Public: it affects the last bits of every
#: gradient.
ROWS = 64

#: Token of rows without a record, and of padding.
FILLER = 0

#: The shape of a pass: tokens of the instruction, and of the whole padded input.
Shape = tuple[int, int]


@dataclass(frozen=True)
class AdaptedModel:
    """A model of its own with adapters, of which the B are trained."""

    language_model: LanguageModel

    @classmethod
    def of(cls, language_model: LanguageModel, rank: int, seed: int) -> AdaptedModel:
        """Load the model of `language_model` anew, with adapters whose A are drawn by `seed`."""
        assert language_model.reference is not None  # it was loaded from files
        reference, placement = language_model.reference, language_model.placement
        return cls(adapted_model(reference, language_model.tokenizer, placement, rank, seed, embeddings=False))

    def __post_init__(self) -> None:
        for name, parameter in self.language_model.model.named_parameters():
            parameter.requires_grad_("lora_B." in name)

    @cached_property
    def layers(self) -> dict[str, nn.Module]:
        """The linear layers that multiply by a B, by name."""
        named = self.language_model.model.named_modules()
        return {name: module for name, module in named if "lora_B." in name}

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """The trained weights w, by their layers' names; each is outputs x rank."""
        return {name: layer.get_parameter("weight") for name, layer in self.layers.items()}

    def table(self) -> pd.DataFrame:
        """Return w: the rows of the stage `private_adapters`."""
        values = [parameter.detach().flatten().tolist() for parameter in self.weights.values()]
        return pd.DataFrame({"weight": [*self.weights], "values": values})

    def load(self, table: pd.DataFrame) -> None:
        """Set w to a released table's."""
        for name, values in zip(table["weight"], table["values"], strict=True):
            parameter = self.weights[name]
            parameter.data = torch.tensor(np.asarray(values)).to(parameter).view_as(parameter)


class RecordGradients:
    """Computes each record's x such that it depends on that record alone.

    Every pass of one shape has the same number of rows, in which a row does not depend on the others, and a length
    that each of its records determines alone. A record whose gradient is not finite takes no part.

    Args:
        rows: in passes of each shape, as `gradient_rows` returns them.
    """

    def __init__(self, adapted: AdaptedModel, rows: Mapping[Shape, int]) -> None:
        self._lm, self._layers = adapted.language_model, [*adapted.layers.values()]
        self._rows_of, self._rows = rows, 0
        self._own: dict[nn.Module, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> RecordGradients:
        for layer in self._layers:
            self._hooks.callback(layer.register_forward_hook(self._add_own_weights).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def __call__(
        self, instruction: Sequence[int], records: Sequence[list[int]]
    ) -> Iterator[Float[Tensor, "records weights"]]:
        """Compute the gradients of one class's records, in float64 on the CPU, with norms of at most 1.

        Args:
            instruction: token ids of the prefix and of the class's instruction.
            records: token ids; none is empty.
        """
        positions = self._lm.positions
        lengths = np.array([padded_length(len(instruction) + len(record), positions) for record in records])
        for length in np.unique(lengths).tolist():
            of_length = np.flatnonzero(lengths == length)
            rows = self._rows_of[len(instruction), length]
            for begin in range(0, len(of_length), rows):
                part = [records[row] for row in of_length[begin : begin + rows]]
                gradients = self.unclipped(part, instruction, length, rows)
                gradients = gradients[gradients.isfinite().all(dim=1)]
                yield gradients / gradients.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)

    def unclipped(
        self,
        records: Sequence[list[int]] | Int[np.ndarray, "records tokens"],
        instruction: Sequence[int],
        length: int,
        rows: int | None = None,
    ) -> Float[Tensor, "records weights"]:
        """Compute the gradients of the records' mean losses per token, of any norm, in one pass.

        Args:
            length: tokens to which the inputs are padded.
            rows: of the pass; default, as many as records.
        """
        begin, self._rows = len(instruction), rows or len(records)
        ids = torch.full((self._rows, length), FILLER)
        ids[:, :begin] = torch.tensor(instruction)
        shares = torch.zeros(self._rows, length - begin)
        for row, record in enumerate(records):
            ids[row, begin : begin + len(record)] = torch.tensor(record)
            shares[row, : len(record)] = 1 / len(record)
        ids, shares = ids.to(self._lm.device), shares.to(self._lm.device)
        self._own.clear()
        hidden = self._lm.hidden_states(input_ids=ids)[:, begin - 1 : -1]
        logits = self._lm.head_product(self._lm.augment(hidden)).flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, ids[:, begin:].flatten(), reduction="none")
        own = [self._own[layer] for layer in self._layers]
        parts = torch.autograd.grad((losses * shares.flatten()).sum(), own)
        return torch.cat([part.flatten(1)[: len(records)] for part in parts], dim=1).double().cpu()

    def _add_own_weights(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Add to a layer's weight one for each row, which is zero, and whose gradient is the row's alone."""
        weight = layer.get_parameter("weight")
        own = weight.new_zeros(self._rows, *weight.shape, requires_grad=True)
        self._own[layer] = own
        # Some layers see the tokens of all rows in one dimension.
        low = inputs[0].reshape(self._rows, -1, weight.shape[1])
        return output + (low @ own.mT).view_as(output)


def gradient_rows(
    adapted: AdaptedModel, template: TokenisedTemplate, data: LabelledTexts, instructions: Mapping[int, str]
) -> dict[Shape, int]:
    """Return how many rows the passes of each shape have; to be checked before a release is charged.

    Raises:
        InputError: if the model gives one text different gradients in two passes.
    """
    language_model = adapted.language_model
    tokens = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, None)
    found: dict[Shape, int] = {}
    with RecordGradients(adapted, {}) as gradients, _some_weights(adapted):
        for label, text in instructions.items():
            instruction = prompt_ids(language_model, text)
            begin, everyone = len(instruction), np.ones(len(data), dtype=bool)
            counts = {len(record) for record in _records(tokens, data, label, everyone)}
            for length in sorted({padded_length(begin + count, language_model.positions) for count in counts}):
                unclipped = partial(gradients.unclipped, instruction=instruction, length=length)
                # Instructions of other classes may have as many tokens.
                most = found.get((begin, length), ROWS)
                found[begin, length] = independent_rows(language_model, most, length - begin, unclipped)
    return found


@contextmanager
def _some_weights(adapted: AdaptedModel) -> Iterator[None]:
    """Let the trained weights be random for a while: where they are zero, so are their products, in every row."""
    random, weights = torch.Generator().manual_seed(0), [weight.data for weight in adapted.weights.values()]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.copy_(0.01 * torch.randn(weight.shape, generator=random))
    try:
        yield
    finally:
        for weight, values in zip(weights, before, strict=True):
            weight.copy_(values)


def train_adapters(
    adapted: AdaptedModel,
    template: TokenisedTemplate,
    data: LabelledTexts,
    rows: Mapping[Shape, int],
    instructions: Mapping[int, str],
    passes: int,
    steps_per_pass: int,
    learning_rate: float,
    claim: GaussianMechanism,
) -> dict[str, Any]:
    """Train the adapters on the records; private.

    Formal guarantee: `claim`'s for the weights, one release of sensitivity 1. Every call draws fresh noise: one
    more release. The figure `token_passes` follows from the records' number and lengths, and is not released.

    Args:
        rows: see `gradient_rows`.
        claim: the mechanism of all sums together.

    Returns:
        The figures of the stage `private_adapters`.
    """
    language_model, mechanism = adapted.language_model, mechanism_of_part(claim, passes)
    tokens = tokenise_split(language_model.tokenizer, data.texts, template.max_text_tokens, None)
    own = {label: prompt_ids(language_model, instruction) for label, instruction in instructions.items()}
    weights = [*adapted.weights.values()]
    size = sum(weight.numel() for weight in weights)
    optimizer = torch.optim.Adam(weights, lr=learning_rate)
    # Not by a seed: which step a record is assigned to must not depend on the other records' places.
    random = np.random.default_rng()
    with (
        ComputeMeter(language_model) as meter,
        RecordGradients(adapted, rows) as gradients,
        tqdm(total=passes * steps_per_pass, desc="private_adapters", disable=None, leave=False) as bar,
    ):
        for _ in range(passes):
            assigned = random.integers(steps_per_pass, size=len(data))
            for step in range(steps_per_pass):
                each = (
                    part
                    for label, instruction in own.items()
                    for part in gradients(instruction, _records(tokens, data, label, assigned == step))
                )
                moves = torch.from_numpy(noisy_sum(each, size, mechanism)).split([w.numel() for w in weights])
                for weight, move in zip(weights, moves, strict=True):
                    weight.grad = move.to(weight).view_as(weight)
                optimizer.step()
                bar.update()
    return {"weights": size, "token_passes": meter.token_passes}


def _records(
    tokens: Sequence[list[int]], data: LabelledTexts, label: int, taking_part: Bool[np.ndarray, " records"]
) -> list[list[int]]:
    """Return the class's records that take part and have tokens."""
    return [record for row in data.of_class(label) if taking_part[row] and (record := tokens[int(row)])]


def check_room(
    language_model: LanguageModel,
    template: TokenisedTemplate,
    instructions: Mapping[int, str],
) -> None:
    """Check that a record has room after an instruction.

    Raises:
        InputError: if the two together exceed the model's positions.
    """
    for instruction in instructions.values():
        tokens = len(prompt_ids(language_model, instruction)) + template.max_text_tokens
        what = f"an instruction and a record of {template.max_text_tokens} tokens"
        language_model.check_fits(tokens, what, "template.max_text_tokens")
