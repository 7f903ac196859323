"""Restricting the last MLP to the last positions leaves their hidden states and gradients unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmm.generation.objectives import HeadMatching
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.last_mlp import last_mlp
from gradmm.lm.template import TokenisedTemplate
from tests.conftest import tiny_language_model


def states_and_gradient(lm: LanguageModel, x: torch.Tensor, last: int, cut: bool):
    x = x.clone().requires_grad_(True)
    states = lm.hidden_states(inputs_embeds=x, last=last if cut else None)
    (gradient,) = torch.autograd.grad(states[:, -last:].sin().sum(), [x])
    return states.detach(), gradient


@pytest.mark.parametrize("family", ["phi", "llama", "gpt2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("last", [1, 3])
def test_the_last_positions_and_their_gradient_are_unchanged(tokenizer, family: str, last: int) -> None:
    lm = tiny_language_model(tokenizer, family)
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, gradient = states_and_gradient(lm, x, last, cut=False)
    cut, its_gradient = states_and_gradient(lm, x, last, cut=True)
    torch.testing.assert_close(cut[:, -last:], whole[:, -last:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(its_gradient, gradient, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(cut[:, :-last], whole[:, :-last])  # the MLP was restricted
    assert torch.equal(states_and_gradient(lm, x, last, cut=False)[0], whole)  # the restriction has ended


def test_a_layer_without_an_mlp_is_unchanged(tokenizer) -> None:
    lm = tiny_language_model(tokenizer, "opt")
    assert last_mlp(lm.model.base_model, lm.sample_ids) is None
    x = torch.randn(2, 6, lm.embeddings.shape[1], dtype=torch.float64)
    assert torch.equal(lm.hidden_states(inputs_embeds=x, last=1), lm.hidden_states(inputs_embeds=x))


class MixesPositions(nn.Module):
    """Its output at a position depends on others."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(dim=1)


class Narrows(nn.Module):
    """Its output has a different shape from its input."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :1]


@pytest.mark.parametrize("mlp", [MixesPositions(), Narrows()])
def test_an_mlp_that_is_not_pointwise_is_unchanged(tokenizer, mlp: nn.Module) -> None:
    lm = tiny_language_model(tokenizer, "phi")
    assert last_mlp(lm.model.base_model, lm.sample_ids) is not None
    lm.model.base_model.layers[-1].mlp = mlp
    assert last_mlp(lm.model.base_model, lm.sample_ids) is None


def test_matching_computes_only_the_response_positions(phi: LanguageModel, template: TokenisedTemplate) -> None:
    seen = []
    mlp = phi.model.base_model.layers[-1].mlp
    matching = HeadMatching(phi, template, 1, torch.ones_like(phi.head))
    x = phi.embed(torch.tensor([[5, 6, 7, 8]]))
    matching(x)  # includes the check of the MLP
    hook = mlp.fc1.register_forward_hook(lambda _fc1, inputs, _output: seen.append(inputs[0].shape[1]))
    try:
        matching(x)
    finally:
        hook.remove()
    assert seen == [len(template.responses[1])]
