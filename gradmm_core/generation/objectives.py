"""The objective of generation: the matching loss of a batch of free embeddings."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.config.settings import MatchingLoss
from gradmm.gradients.head_gradient import HeadGradients
from gradmm.lm.bfloat16_product import FrozenProduct
from gradmm.lm.free_text import FreeText
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate
from gradmm.target.features import text_means
from gradmm.target.probe import Probe
from gradmm.target.target_space import FULL, TargetSpace


class HeadMatching:
    """The matching loss between each example's head gradient and the class's target, in closed form."""

    def __init__(
        self,
        language_model: LanguageModel,
        template: TokenisedTemplate,
        label: int,
        target: Float[Tensor, "rows dimensions"],
        space: TargetSpace = FULL,
        loss: MatchingLoss = "cosine",
        probe: Probe | None = None,
        probe_weight: float = 0.0,
        compile_layers: bool = False,
    ) -> None:
        self._lm = language_model
        self._compile_layers = compile_layers
        self._probe = probe if probe_weight > 0 else None
        self._probe_weight = probe_weight
        self._label = label
        self._space = space
        self._loss: MatchingLoss = loss
        self._free_text = FreeText(language_model, template, label)
        self._target = target.to(language_model.device, language_model.head_dtype)
        # In smaller spaces the product is cheap.
        whole = space.rows is None and space.basis is None
        self._products = FrozenProduct(self._target, language_model.body_dtype) if whole else None

    def __call__(self, x: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, " batch"]:
        """Compute matching losses, without the probe's, differentiable with respect to x."""
        # Hooks, which restrict the last layer, have no effect in compiled code.
        read = None if self._compile_layers else self._free_text.response_ids.shape[1]
        with self._layers:
            hidden = self._lm.hidden_states(inputs_embeds=self._free_text(x), last=read)
        return self._losses(hidden)

    def with_logits(
        self, x: Float[Tensor, "batch tokens hidden"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch following vocab"]]:
        """Compute, in one pass, the losses and the logits of all text tokens but the first.

        A loss is the matching loss plus `probe_weight` times the probe's loss, and is differentiable. The logits
        are detached and have the precision of the model's dtype, which is sufficient for a text's likelihood.
        """
        begin = self._free_text.text_begins
        if self._probe is None:
            with self._layers:
                hidden = self._lm.hidden_states(inputs_embeds=self._free_text(x))
            probe_losses: float | Tensor = 0.0
        else:
            with self._layers:
                layers = self._lm.layers(inputs_embeds=self._free_text(x))
            of_text = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            means = text_means([layer[:, begin : begin + x.shape[1]] for layer in layers], of_text)
            hidden, probe_losses = layers[-1], self._probe_weight * self._probe.losses(means, self._label)
        # Contiguous: for a view, torch computes one small product per text, which is many times slower.
        read = hidden[:, begin : begin + x.shape[1] - 1].detach().contiguous()
        losses = self._losses(hidden) + probe_losses
        return losses, self._lm.model.get_output_embeddings()(read).to(self._lm.head_dtype)

    @property
    def _layers(self) -> AbstractContextManager[None]:
        return self._lm.compiled_layers() if self._compile_layers else nullcontext()

    def _losses(self, hidden: Float[Tensor, "batch length hidden"]) -> Float[Tensor, " batch"]:
        response_ids = self._free_text.response_ids.expand(len(hidden), -1)
        augmented = self._lm.augment(hidden[:, -response_ids.shape[1] :])
        gradients = HeadGradients.from_logits(
            self._lm.head_product(augmented),
            augmented,
            response_ids,
            torch.ones_like(response_ids, dtype=torch.bool),
        )
        products = self._products(augmented) if self._products else None
        return self._space.project(gradients, self._label).matching_losses(self._target, self._loss, products)
