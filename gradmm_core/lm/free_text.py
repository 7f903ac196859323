"""Model inputs with free embeddings in place of the text's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate


class FreeText:
    """Build inputs with free embeddings X in place of the text: prefix + X + suffix + response[:-1]."""

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
        """Return input embeddings in the body's dtype. The last m positions predict the response."""
        x = x.to(self.language_model.body_dtype)
        return torch.cat([self._before.expand(len(x), -1, -1), x, self._after.expand(len(x), -1, -1)], dim=1)
