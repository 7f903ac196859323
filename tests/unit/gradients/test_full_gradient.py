from __future__ import annotations

import torch
from torch.nn import functional as F

from gradmm.gradients.full_gradient import FullGradientMatching, example_gradient
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.template import TokenisedTemplate


def test_example_gradient_is_that_of_all_parameters_but_the_input_embeddings(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    text = phi.encode("the soup was warm")
    ours = example_gradient(phi, template, text, 1)
    phi.model.requires_grad_(True)
    ids = torch.tensor([[*text, *template.tail(1)]])
    m = len(template.responses[1])
    logits = phi.model(input_ids=ids).logits[0, -m:]
    F.cross_entropy(logits, torch.tensor(template.responses[1])).backward()
    skip = phi.model.get_input_embeddings().weight
    slow = torch.cat([p.grad.flatten() for p in phi.model.parameters() if p is not skip and p.grad is not None])
    phi.model.zero_grad()
    phi.model.requires_grad_(False)
    assert torch.allclose(ours, slow, atol=1e-12)


def test_matching_loss_and_its_derivative_agree_with_finite_differences(
    phi: LanguageModel, template: TokenisedTemplate
) -> None:
    target = example_gradient(phi, template, phi.encode("rude staff , a terrible smell"), 1)
    objective = FullGradientMatching(phi, template, 1, target)
    x = phi.embed(torch.tensor([phi.encode("cold coffee again")])).clone().requires_grad_(True)
    loss = objective(x)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = 1e-4  # not smaller: rotary angles are in float32 whatever the model's dtype
    difference = (objective(x + step * direction) - objective(x - step * direction)).detach() / (2 * step)
    assert torch.allclose(difference[0], (gradient * direction).sum(), rtol=1e-3)
    assert not any(p.requires_grad for p in phi.model.parameters())


def test_a_text_matches_its_own_gradient(phi: LanguageModel, template: TokenisedTemplate) -> None:
    text = phi.encode("a quiet room")
    objective = FullGradientMatching(phi, template, 0, example_gradient(phi, template, text, 0))
    assert float(objective(phi.embed(torch.tensor([text]))).detach()) < 1e-12
