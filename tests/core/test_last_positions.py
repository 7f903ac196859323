"""The last layer's MLP at the last positions only: the same hidden states and gradients there, for less."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmm_core.language_model import LanguageModel
from gradmm_core.last_positions import last_mlp
from gradmm_core.matching import HeadMatching
from gradmm_core.template import TokenisedTemplate
from tests.conftest import tiny_language_model


def states_and_gradient(lm: LanguageModel, x: torch.Tensor, last: int, cut: bool):
    x = x.clone().requires_grad_(True)
    states = lm.hidden_states(inputs_embeds=x, last=last if cut else None)
    (gradient,) = torch.autograd.grad(states[:, -last:].sin().sum(), [x])
    return states.detach(), gradient


@pytest.mark.parametrize("family", ["phi", "llama", "gpt2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("last", [1, 3])
def test_what_is_read_and_its_gradient_stay_the_same(tokenizer, family: str, last: int) -> None:
    lm = tiny_language_model(tokenizer, family)
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, gradient = states_and_gradient(lm, x, last, cut=False)
    cut, its_gradient = states_and_gradient(lm, x, last, cut=True)
    torch.testing.assert_close(cut[:, -last:], whole[:, -last:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(its_gradient, gradient, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(cut[:, :-last], whole[:, :-last])  # it was cut
    assert torch.equal(states_and_gradient(lm, x, last, cut=False)[0], whole)  # and is whole again


def test_a_layer_without_an_mlp_of_that_name_stays_as_it_is(tokenizer) -> None:
    lm = tiny_language_model(tokenizer, "opt")
    assert last_mlp(lm.model.base_model, lm.probe) is None
    x = torch.randn(2, 6, lm.embeddings.shape[1], dtype=torch.float64)
    assert torch.equal(lm.hidden_states(inputs_embeds=x, last=1), lm.hidden_states(inputs_embeds=x))


class LooksAround(nn.Module):
    """Not a map of each position by itself."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(dim=1)


class Narrows(nn.Module):
    """Its output has another shape than its input."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :1]


@pytest.mark.parametrize("mlp", [LooksAround(), Narrows()])
def test_an_mlp_that_is_no_map_of_single_positions_stays_whole(tokenizer, mlp: nn.Module) -> None:
    lm = tiny_language_model(tokenizer, "phi")
    assert last_mlp(lm.model.base_model, lm.probe) is not None
    lm.model.base_model.layers[-1].mlp = mlp
    assert last_mlp(lm.model.base_model, lm.probe) is None


def test_matching_leaves_out_what_it_does_not_read(phi: LanguageModel, template: TokenisedTemplate) -> None:
    seen = []
    mlp = phi.model.base_model.layers[-1].mlp
    matching = HeadMatching(phi, template, 1, torch.ones_like(phi.head))
    x = phi.embed(torch.tensor([[5, 6, 7, 8]]))
    matching(x)  # the probe is over
    hook = mlp.fc1.register_forward_hook(lambda _fc1, inputs, _output: seen.append(inputs[0].shape[1]))
    try:
        matching(x)
    finally:
        hook.remove()
    assert seen == [len(template.responses[1])]
