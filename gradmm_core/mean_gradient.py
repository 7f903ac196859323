"""The gradient of the mean response loss of many texts, in all parameters, by plain autograd.

"All" are those that fine-tuning changes, the input embeddings among them (`full_gradient`, whose texts are free
embeddings, leaves these out). The head's part is the gradient in the output head's weight and bias. Where the head
is tied to the input embeddings it has their share too, since they are one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm_core.classification import response_logits, response_losses
from gradmm_core.finetune_eval import Examples
from gradmm_core.language_model import LanguageModel
from gradmm_core.template import TokenisedTemplate, length_bucketed, make_batch

#: Examples per backward pass. On a CPU 8 to 64 of like length take the same time within a fifth.
BATCH_SIZE = 32

#: Numbers that are in float64 at once while an inner product is summed.
CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class MeanGradient:
    """The mean loss (nats) of some texts, and its gradient: a tensor for each of the model's parameters."""

    loss: float
    gradient: Sequence[Tensor]


def mean_gradient(
    language_model: LanguageModel, template: TokenisedTemplate, examples: Examples, batch_size: int = BATCH_SIZE
) -> MeanGradient:
    """The mean over all examples, in the model's dtype. The parameters' own `grad` is left as it is.

    Raises:
        RuntimeError: from autograd, if the parameters are frozen.
    """
    parameters = list(language_model.model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    loss = 0.0
    for rows in length_bucketed([len(text) for text in examples.texts], batch_size):
        part = examples.take(rows)
        batch = make_batch(template, part.texts, part.labels, language_model.device)
        losses = response_losses(response_logits(language_model, batch), batch)
        gradients = torch.autograd.grad(losses.sum() / len(examples), parameters, materialize_grads=True)
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient
        loss += losses.detach().double().sum().item() / len(examples)
    return MeanGradient(loss, total)


def in_head(language_model: LanguageModel) -> list[bool]:
    """Of each of the model's parameters, whether it is the output head's."""
    head = {id(parameter) for parameter in language_model.model.get_output_embeddings().parameters()}
    return [id(parameter) in head for parameter in language_model.model.parameters()]


def inner_products(first: Sequence[Tensor], second: Sequence[Tensor]) -> Float[Tensor, " parameters"]:
    """<a, b> of each parameter's tensors, summed in float64; on the CPU."""
    return torch.stack([_dot(a, b) for a, b in zip(first, second, strict=True)]).cpu()


def squared_distances(first: Iterable[Tensor], second: Iterable[Tensor]) -> Float[Tensor, " parameters"]:
    """||a - b||^2 of each parameter's tensors: differences first, since a and b are near to each other."""
    return torch.stack([_squared_distance(a, b) for a, b in zip(first, second, strict=True)]).cpu()


def distance(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """||a - b|| over all parameters."""
    return squared_distances(first, second).sum().sqrt().item()


def _dot(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    chunks = zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True)
    return torch.stack([torch.dot(x.double(), y.double()) for x, y in chunks]).sum()


def _squared_distance(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    chunks = zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True)
    return torch.stack([(x.double() - y.double()).square().sum() for x, y in chunks]).sum()
