"""The published procedure of GRADMM, the baseline of the speed comparisons.

Written from the description of the paper and its code: ten examples share one gradient and one loss. Autograd
differentiates the matching loss through the head's gradient, a matrix as large as the head. Logits are computed at
every position, and a perplexity of the text is computed and multiplied by zero. The projection reads its prompt
twice for every token, and sorts the whole vocabulary for every row. All in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from gradmm.config.settings import AdmmSettings
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate
from gradmm.lm.vocabulary import AllowedTokens

#: Examples that share a gradient.
BATCH = 10


@dataclass
class Published:
    """Generates texts of one class.

    Args:
        target: a gradient of the head with its bias.
        allowed: tokens that may be chosen; the first token must be able to start a text, as in gradmm.
        candidates: k of the projection.
    """

    model: LanguageModel
    template: TokenisedTemplate
    label: int
    target: Tensor
    instruction: str
    allowed: AllowedTokens
    candidates: int = 200
    _is_allowed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._is_allowed = torch.zeros(len(self.model.embeddings), dtype=torch.bool, device=self.model.device)
        self._is_allowed[self.allowed.ids] = True

    def matching_loss(self, x: Tensor) -> Tensor:
        """Compute one loss for the whole batch, differentiable in x."""
        head = self.model.model.get_output_embeddings()
        parameters = [p.requires_grad_(True) for p in (head.weight, head.bias) if p is not None]
        response = torch.tensor(self.template.responses[self.label], device=self.model.device)
        inputs = [self._embedded(self.template.prefix, len(x)), x]
        inputs.append(self._embedded(self.template.tail(self.label), len(x)))
        logits = self.model.model(inputs_embeds=torch.cat(inputs, dim=1), use_cache=False).logits
        loss = F.cross_entropy(logits[:, -len(response) :].flatten(0, 1), response.repeat(len(x)))
        parts = torch.autograd.grad(loss, parameters, create_graph=True)
        gradient = torch.cat([part if part.ndim == 2 else part[:, None] for part in parts], dim=1)
        head.requires_grad_(False)
        return 1 - F.cosine_similarity(gradient.flatten(), self.target.flatten(), dim=0)

    def x_gradient(self, x: Tensor, z_ids: Tensor, dual: Tensor, rho: float) -> Tensor:
        """Compute the gradient of the augmented Lagrangian with respect to x."""
        x = x.detach().requires_grad_(True)
        pull = self.model.embed(z_ids) - dual / rho
        text = self.model.model(inputs_embeds=x, use_cache=False).logits
        perplexity = F.cross_entropy(text[:, :-1].flatten(0, 1), z_ids[:, 1:].flatten()).exp()
        loss = self.matching_loss(x) + rho / 2 * (x - pull).square().sum() + 0.0 * perplexity
        return torch.autograd.grad(loss, x)[0]

    @torch.no_grad()
    def project(self, x: Tensor) -> Tensor:
        """Choose the nearest of the k likeliest allowed tokens at each position; return token ids."""
        prompt = [*self.model.prefix_ids, *self.model.encode(self.instruction)]
        ids = torch.tensor([prompt], device=self.model.device).repeat(len(x), 1)
        for j in range(x.shape[1]):
            for _ in range(2):
                logits = self.model.model(input_ids=ids, use_cache=False).logits[:, -1]
            if j == 0:
                first = self.allowed.first_logits(logits[:, self.allowed.ids])
                logits = torch.full_like(logits, -torch.inf).index_copy(1, self.allowed.ids, first)
            chosen = []
            for row in range(len(x)):
                ranked = logits[row].sort(descending=True).indices
                likely = ranked[self._is_allowed[ranked]][: self.candidates]
                distances = (self.model.embeddings[likely] - x[row, j]).square().sum(dim=1)
                chosen.append(likely[distances.argmin()])
            ids = torch.cat([ids, torch.stack(chosen)[:, None]], dim=1)
        return ids[:, len(prompt) :]

    def generate(self, start: Tensor, settings: AdmmSettings) -> Tensor:
        """Run Algorithm 1 from the embeddings of `start`, in batches of ten; return token ids."""
        return torch.cat([self._generate(part, settings) for part in start.split(BATCH)])

    def _generate(self, start: Tensor, settings: AdmmSettings) -> Tensor:
        x = self.model.embed(start).clone()
        dual = torch.zeros_like(x)
        for t in range(settings.iterations):
            ids = self.project(x + dual / settings.rho)
            if t > 0:
                dual = dual + settings.rho * (x - self.model.embed(ids))
            x = x.detach().requires_grad_(True)
            adam = torch.optim.Adam([x], lr=settings.learning_rate)
            for _ in range(settings.inner_steps):
                x.grad = self.x_gradient(x, ids, dual, settings.rho)
                torch.nn.utils.clip_grad_norm_([x], settings.gradient_clip)
                adam.step()
            x = x.detach()
        return self.project(x)

    def _embedded(self, ids: tuple[int, ...], rows: int) -> Tensor:
        return self.model.embed(torch.tensor(ids, dtype=torch.long, device=self.model.device)).expand(rows, -1, -1)
