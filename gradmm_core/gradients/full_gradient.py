"""Match the gradient of all parameters by autograd: the paper's ablation (section 5.4).

"All parameters" are those of the body and the head. The input embeddings are excluded, because free embeddings
replace them. If they are tied to the head, the shared matrix is included, with the head's contribution only. There
is no closed form: each example needs one backward pass for its gradient and a second one through it, and memory
for a full gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from gradmm.lm.free_text import FreeText
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate


@contextmanager
def trainable(language_model: LanguageModel) -> Iterator[list[Parameter]]:
    """Let autograd track the parameters inside the block, and yield those that are differentiated."""
    model = language_model.model
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    excluded = None if tied else model.get_input_embeddings().weight
    parameters = [p for p in model.parameters() if p is not excluded]
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
    """Compute the flattened gradient of the response's mean cross-entropy, predicted at the last m positions."""
    with torch.enable_grad(), trainable(language_model) as parameters:
        out = language_model.model(inputs_embeds=inputs_embeds, use_cache=False)
        loss = F.cross_entropy(out.logits[0, -len(response_ids) :], response_ids)
        gradients = torch.autograd.grad(loss, parameters, create_graph=create_graph, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def example_gradient(
    language_model: LanguageModel, template: TokenisedTemplate, text: list[int], label: int
) -> Float[Tensor, " parameters"]:
    """Compute the full gradient of one tokenised text with its label's response."""
    free_text = FreeText(language_model, template, label)
    ids = torch.tensor(text, device=language_model.device)
    embeds = free_text(language_model.embed(ids)[None])
    return response_gradient(language_model, embeds, free_text.response_ids[0], create_graph=False)


class FullGradientMatching:
    """The loss 1 - cos between each example's full gradient and the class's target. Needs eager attention."""

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
        # The table stores the target in chunks and pads the last one.
        self._target = target.flatten()[:size].to(language_model.device, language_model.body_dtype)

    def __call__(self, x: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, " batch"]:
        """Compute matching losses, differentiable with respect to x, one example at a time."""
        return torch.stack([self._loss(example[None]) for example in x])

    def _loss(self, x: Float[Tensor, "1 tokens hidden"]) -> Float[Tensor, ""]:
        gradient = response_gradient(
            self._lm,
            self._free_text(x),
            self._free_text.response_ids[0],
            create_graph=torch.is_grad_enabled(),
        )
        # In bfloat16 the sums over all parameters, and the loss, would have three digits.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return 1 - F.cosine_similarity(gradient.to(wide), self._target.to(wide), dim=0)
