"""Compute the gradient of the mean response loss of many texts with respect to all parameters, by autograd.

"All parameters" are those that fine-tuning updates, including the input embeddings. (`full_gradient` excludes
them, because its texts are free embeddings.) The head's part is the gradient with respect to the output head's
weight and bias. If the head is tied to the input embeddings, the two are one matrix, and the head's part includes
the embeddings' contribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.data.examples import Examples
from gradmm.lm.classification import class_losses
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate, length_bucketed

#: Examples per backward pass. On a CPU, 8 to 64 examples of similar length take the same time to within 20%.
BATCH_SIZE = 32

#: Elements that an inner product converts to float64 at a time.
CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class MeanGradient:
    """The mean loss (nats) of some texts and its gradient, one tensor for each model parameter."""

    loss: float
    gradient: Sequence[Tensor]


def mean_gradient(
    language_model: LanguageModel, template: TokenisedTemplate, examples: Examples, batch_size: int = BATCH_SIZE
) -> MeanGradient:
    """Average the loss and its gradient over all examples, in the model's dtype. Leaves `grad` unchanged.

    Raises:
        RuntimeError: from autograd, if the parameters are frozen.
    """
    parameters = list(language_model.model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    loss = 0.0
    for rows in length_bucketed([len(text) for text in examples.texts], batch_size):
        part = examples.take(rows)
        probabilities = part.class_probabilities(template.labels)
        losses = class_losses(language_model, template, part.texts, probabilities)
        gradients = torch.autograd.grad(losses.sum() / len(examples), parameters, materialize_grads=True)
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient
        loss += losses.detach().double().sum().item() / len(examples)
    return MeanGradient(loss, total)


def in_head(language_model: LanguageModel) -> list[bool]:
    """Flag the parameters of the output head, in the order of the model's parameters."""
    head = {id(parameter) for parameter in language_model.model.get_output_embeddings().parameters()}
    return [id(parameter) in head for parameter in language_model.model.parameters()]


def inner_products(first: Sequence[Tensor], second: Sequence[Tensor]) -> Float[Tensor, " parameters"]:
    """Compute <a, b> for each parameter's tensors, summed in float64; the result is on the CPU."""
    return torch.stack([_dot(a, b) for a, b in zip(first, second, strict=True)]).cpu()


def squared_distances(first: Iterable[Tensor], second: Iterable[Tensor]) -> Float[Tensor, " parameters"]:
    """Compute ||a - b||^2 for each parameter's tensors. Subtracts first, because a and b are close together."""
    return torch.stack([_squared_distance(a, b) for a, b in zip(first, second, strict=True)]).cpu()


def distance(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """Compute ||a - b|| over all parameters."""
    return squared_distances(first, second).sum().sqrt().item()


def _dot(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    chunks = zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True)
    return torch.stack([torch.dot(x.double(), y.double()) for x, y in chunks]).sum()


def _squared_distance(a: Tensor, b: Tensor) -> Float[Tensor, ""]:
    chunks = zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True)
    return torch.stack([(x.double() - y.double()).square().sum() for x, y in chunks]).sum()
