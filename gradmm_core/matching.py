"""The matching loss of a batch of free embeddings: what generation minimises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm_core.frozen_product import FrozenProduct
from gradmm_core.head_gradient import HeadGradients
from gradmm_core.language_model import LanguageModel
from gradmm_core.probe import Probe
from gradmm_core.settings import MatchingLoss
from gradmm_core.target_space import FULL, TargetSpace
from gradmm_core.template import TokenisedTemplate
from gradmm_core.text_features import text_means


class FreeText:
    """Inputs in which free embeddings stand in place of a text: prefix + X + suffix + response[:-1]."""

    def __init__(self, language_model: LanguageModel, template: TokenisedTemplate, label: int) -> None:
        self.language_model = language_model
        response = torch.tensor(template.responses[label], device=language_model.device)
        self.response_ids = response[None]
        self.text_begins = len(template.prefix)
        self._before = self._embed(template.prefix)
        self._after = self._embed(template.tail(label))

    def _embed(self, ids: Sequence[int]) -> Float[Tensor, "1 tokens hidden"]:
        device = self.language_model.device
        return self.language_model.embed(torch.tensor(ids, dtype=torch.long, device=device))[None]

    def __call__(self, x: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, "batch length hidden"]:
        """Input embeddings in the body's dtype. The response is predicted at the last m positions."""
        x = x.to(self.language_model.body_dtype)
        return torch.cat([self._before.expand(len(x), -1, -1), x, self._after.expand(len(x), -1, -1)], dim=1)


class HeadMatching:
    """How far each example's head gradient is from the class's target, in its space, in closed form."""

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
    ) -> None:
        self._lm = language_model
        self._probe = probe if probe_weight > 0 else None
        self._probe_weight = probe_weight
        self._label = label
        self._space = space
        self._loss: MatchingLoss = loss
        self._free_text = FreeText(language_model, template, label)
        self._target = target.to(language_model.device, language_model.head_dtype)
        # In smaller spaces than the whole head's this product is small.
        whole = space.rows is None and space.basis is None
        self._products = FrozenProduct(self._target, language_model.body_dtype) if whole else None

    def __call__(self, x: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, " batch"]:
        """Matching losses, differentiable with respect to x."""
        read = self._free_text.response_ids.shape[1]
        return self._losses(self._lm.hidden_states(inputs_embeds=self._free_text(x), last=read))

    def with_logits(
        self, x: Float[Tensor, "batch tokens hidden"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch following vocab"]]:
        """Matching losses with the price of the probe's, and from one pass the logits of all tokens but the first.

        The latter are as exact as the model's dtype, which is enough for saying how likely a text is.
        """
        begin = self._free_text.text_begins
        if self._probe is None:
            hidden = self._lm.hidden_states(inputs_embeds=self._free_text(x))
            prices: float | Tensor = 0.0
        else:
            layers = self._lm.layers(inputs_embeds=self._free_text(x))
            of_text = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            means = text_means([layer[:, begin : begin + x.shape[1]] for layer in layers], of_text)
            hidden, prices = layers[-1], self._probe_weight * self._probe.losses(means, self._label)
        # Contiguous: of a view torch would make one small product for each text, many times slower.
        read = hidden[:, begin : begin + x.shape[1] - 1].detach().contiguous()
        return self._losses(hidden) + prices, self._lm.model.get_output_embeddings()(read).to(self._lm.head_dtype)

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
