"""Matching the gradient of all parameters: the paper's ablation (section 5.4), by plain autograd.

"All" are the parameters of body and head. The input embeddings are left out, since free embeddings take their
place; where they are tied to the head, the head's share stays in. There is no closed form: each example costs a
backward pass for its gradient and a second one through it, so this is slow and takes memory for a full gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from gradmm_core.language_model import LanguageModel
from gradmm_core.matching import FreeText
from gradmm_core.template import TokenisedTemplate


@contextmanager
def trainable(language_model: LanguageModel) -> Iterator[list[Parameter]]:
    """The parameters that the gradient is taken of, tracked by autograd inside the block."""
    model = language_model.model
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    left_out = None if tied else model.get_input_embeddings().weight
    parameters = [p for p in model.parameters() if p is not left_out]
    model.requires_grad_(True)
    try:
        yield parameters
    finally:
        model.requires_grad_(False)


def response_gradient(
    language_model: LanguageModel,
    inputs_embeds: Float[Tensor, "1 tokens hidden"],
    response_ids: Int[Tensor, " m"],
    create_graph: bool,
) -> Float[Tensor, " parameters"]:
    """Gradient of the mean cross-entropy of the response, predicted at the last m positions, flattened."""
    with torch.enable_grad(), trainable(language_model) as parameters:
        out = language_model.model(inputs_embeds=inputs_embeds, use_cache=False)
        loss = F.cross_entropy(out.logits[0, -len(response_ids) :], response_ids)
        gradients = torch.autograd.grad(loss, parameters, create_graph=create_graph, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def example_gradient(
    language_model: LanguageModel, template: TokenisedTemplate, text: list[int], label: int
) -> Float[Tensor, " parameters"]:
    """The full gradient of one tokenised text with its label's response."""
    free_text = FreeText(language_model, template, label)
    ids = torch.tensor(text, device=language_model.device)
    embeds = free_text(language_model.embed(ids)[None])
    return response_gradient(language_model, embeds, free_text.response_ids[0], create_graph=False)


class FullGradientMatching:
    """1 - cos between each example's full gradient and the class's target. Needs eager attention."""

    def __init__(
        self,
        language_model: LanguageModel,
        template: TokenisedTemplate,
        label: int,
        target: Float[Tensor, "chunks width"] | Float[Tensor, " parameters"],
    ) -> None:
        self._lm = language_model
        self._free_text = FreeText(language_model, template, label)
        with trainable(language_model) as parameters:
            size = sum(p.numel() for p in parameters)
        # The target comes out of its table in chunks, the last one padded.
        self._target = target.flatten()[:size].to(language_model.device, language_model.body_dtype)

    def __call__(self, x: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, " batch"]:
        """Matching losses, differentiable with respect to x; one example at a time."""
        return torch.stack([self._loss(example[None]) for example in x])

    def _loss(self, x: Float[Tensor, "1 tokens hidden"]) -> Float[Tensor, ""]:
        gradient = response_gradient(
            self._lm,
            self._free_text(x),
            self._free_text.response_ids[0],
            create_graph=torch.is_grad_enabled(),
        )
        return 1 - F.cosine_similarity(gradient, self._target, dim=0)
